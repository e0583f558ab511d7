"""Where the nodes of a draft tree stand in a picture, and in which colors."""

from dataclasses import dataclass

from .cycles import Cycle


ACCEPTED, BONUS, DRAFTED = "#15803d", "#c2410c", "#64748b"
_LONGEST = 15

Place = tuple[int, int]


@dataclass(frozen=True)
class TreeLayout:
    """
    Attributes:
        places: The column and the row of each node. The root is in the first column, and a node in the row of its best
            child.
        bonus: The same of the bonus token, if there is one.
        num_columns: Of all of them.
        num_rows: Of all of them.
    """

    places: tuple[Place, ...]
    bonus: Place | None
    num_columns: int
    num_rows: int


def lay_out(cycle: Cycle) -> TreeLayout:
    """Returns where the nodes of a cycle's draft tree stand."""
    places, num_rows = _place_nodes(cycle)
    bonus = None
    if cycle.bonus_token is not None:
        last = cycle.last_accepted
        # Beside the last accepted node where it has no child, in a row of its own at the bottom where it has some.
        row = num_rows if cycle.children(last) else places[last][1]
        bonus = (places[last][0] + 1, row)
        num_rows = max(num_rows, row + 1)
    num_columns = 1 + max(column for column, _ in [*places, *([bonus] if bonus is not None else [])])
    return TreeLayout(tuple(places), bonus, num_columns, num_rows)


def shorten(text: str) -> str:
    """Returns as much of a text as fits into the box of a node."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _place_nodes(cycle: Cycle) -> tuple[list[Place], int]:
    """Returns the place of each node, and the number of rows."""
    places = [(0, 0)] * len(cycle.tokens)
    num_rows = 0

    def place(node: int, column: int) -> None:
        nonlocal num_rows
        children = cycle.children(node)
        places[node] = (column, num_rows)
        for child in children:
            place(child, column + 1)
        if not children:
            num_rows += 1

    place(0, 0)
    return places, num_rows
