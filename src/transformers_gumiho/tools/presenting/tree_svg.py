"""A draft tree as an SVG picture, without a library."""

from html import escape

from .cycles import Cycle, CycleLabels, shorten


ACCEPTED, BONUS, DRAFTED = "#15803d", "#c2410c", "#64748b"
# Pixels, and characters of a box.
_ROW, _COLUMN, _BOX = 34, 122, (104, 28)
_MARGIN, _LINE, _MIN_WIDTH = 4, 16, 640
_LONGEST = 15
LEGEND = (
    "✓ and green: accepted. Gray: rejected. Dashed: the bonus token, which the target chose.",
    "In a box: the probability of the token after those before it, and that of its path (the shade).",
)

Place = tuple[int, int]


def lay_out(cycle: Cycle) -> list[Place]:
    """
    Returns the column and the row of each node of a cycle's draft tree, and of its bonus token, if there is one. The
    root is in the first column, and a node in the row of its best child.
    """
    places, num_rows = [(0, 0)] * len(cycle.tokens), 0

    def place(node: int, column: int) -> None:
        nonlocal num_rows
        places[node] = (column, num_rows)
        children = cycle.children(node)
        for child in children:
            place(child, column + 1)
        num_rows += not children

    place(0, 0)
    if cycle.bonus_token is None:
        return places
    column, row = places[cycle.last_accepted]
    # Beside the last accepted node where it has no child, in a row of its own at the bottom where it has some.
    return [*places, (column + 1, num_rows if cycle.children(cycle.last_accepted) else row)]


def tree_svg(cycle: Cycle, labels: CycleLabels, is_alone: bool = False) -> str:
    """
    Draws the draft tree of a cycle from the root on the left to its deepest nodes. The same cycle gives the same text.

    Args:
        cycle: The cycle.
        labels: The texts of its tokens.
        is_alone: Whether the picture stands alone: then it has a white ground, and says what it shows.

    Returns:
        An SVG element.
    """
    places = lay_out(cycle)
    lines, boxes = [], [_box(places[0], labels.nodes[0], "newest token", "currentColor", 0.0, 2)]
    for node in range(1, len(cycle.tokens)):
        is_accepted, of_path = node in cycle.accepted, cycle.path_probability(node)
        color, width, mark = (ACCEPTED, 2, "✓ ") if is_accepted else (DRAFTED, 1, "")
        lines.append((is_accepted, _line(places[cycle.parents[node]], places[node], color, width)))
        numbers = f"{cycle.token_probability(node):.3f}   {of_path:.3f}"
        boxes.append(_box(places[node], mark + labels.nodes[node], numbers, color, of_path, width))
    if labels.bonus is not None:
        lines.append((True, _line(places[cycle.last_accepted], places[-1], BONUS, 2, dashes="5 3")))
        boxes.append(_box(places[-1], labels.bonus, "bonus token", BONUS, 0.0, 2, dashes="5 3"))
    # Accepted lines are drawn last, above the others.
    drawn = [line for _, line in sorted(lines)] + boxes
    columns, rows = (1 + max(numbers) for numbers in zip(*places, strict=True))
    width, height, top = columns * _COLUMN + 2 * _MARGIN, rows * _ROW + 2 * _MARGIN, -_MARGIN
    if is_alone:
        texts, width = [*LEGEND, cycle.summary], max(width, _MIN_WIDTH)
        drawn.append(_text(-_LINE // 2, f"after {labels.context}"))
        drawn += [_text(height + (number + 1) * _LINE, text) for number, text in enumerate(texts)]
        top, height = top - 2 * _LINE, height + (len(texts) + 3) * _LINE
        drawn.insert(0, f'<rect x="{-_MARGIN}" y="{top}" width="{width}" height="{height}" fill="white"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gumiho-tree" width="{width}" height="{height}" '
        f'viewBox="{-_MARGIN} {top} {width} {height}" font-family="monospace" font-size="10" '
        f'text-anchor="middle" fill="currentColor">{"".join(drawn)}</svg>'
    )


def _text(y: int, text: str) -> str:
    return f'<text x="0" y="{y}" text-anchor="start">{escape(text)}</text>'


def _line(start: Place, stop: Place, color: str, width: int, dashes: str = "none") -> str:
    """Draws a line that leaves the box at `start` to the right, turns, and enters the one at `stop`."""
    left, right = start[0] * _COLUMN + _BOX[0], stop[0] * _COLUMN
    turn = (left + right) // 2
    top, bottom = (row * _ROW + _ROW // 2 for row in (start[1], stop[1]))
    return (
        f'<path d="M{left} {top}H{turn}V{bottom}H{right}" fill="none" stroke="{color}" stroke-width="{width}" '
        f'stroke-dasharray="{dashes}"/>'
    )


def _box(place: Place, text: str, note: str, color: str, shade: float, width: int, dashes: str = "none") -> str:
    left, top = place[0] * _COLUMN, place[1] * _ROW + (_ROW - _BOX[1]) // 2
    middle = left + _BOX[0] // 2
    text = escape(shorten(text, _LONGEST)).replace(" ", "\N{NO-BREAK SPACE}")  # an SVG runs other spaces together
    return (
        f'<rect x="{left}" y="{top}" width="{_BOX[0]}" height="{_BOX[1]}" rx="4" fill="rgba(96,165,250,{shade:.2f})" '
        f'stroke="{color}" stroke-width="{width}" stroke-dasharray="{dashes}"/>'
        f'<text x="{middle}" y="{top + 12}">{text}</text>'
        f'<text x="{middle}" y="{top + 24}" font-size="9" opacity="0.7">{escape(note)}</text>'
    )
