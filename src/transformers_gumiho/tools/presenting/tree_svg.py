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
    """Returns the column and row of each node and of the bonus token. A node is beside its best child."""
    places, num_rows = [(0, 0)] * len(cycle.above), 0

    def place(node: int, column: int) -> None:
        nonlocal num_rows
        places[node] = (column, num_rows)
        children = cycle.children(node)
        for child in children:
            place(child, column + 1)
        num_rows += not children

    place(0, 0)
    return places


def tree_svg(cycle: Cycle, labels: CycleLabels, is_alone: bool = False) -> str:
    """Returns the draft tree of a cycle as an SVG element. One that `is_alone` says what it shows."""
    places = lay_out(cycle)
    lines, boxes = [], [_box(places[0], labels.nodes[0], "newest token", "currentColor", 2)]
    for node, above in enumerate(cycle.above[1:], 1):
        text, shade, dashes = labels.nodes[node], 0.0, "none"
        if node == len(cycle.tokens):
            color, width, note, dashes = BONUS, 2, "bonus token", "5 3"
        else:
            is_accepted, shade = node in cycle.accepted, cycle.path_probability(node)
            color, width, mark = (ACCEPTED, 2, "✓ ") if is_accepted else (DRAFTED, 1, "")
            text = mark + text
            note = f"{cycle.token_probability(node):.3f}   {shade:.3f}"
        lines.append((width, _line(places[above], places[node], color, width, dashes)))
        boxes.append(_box(places[node], text, note, color, width, shade, dashes))
    # The lines of what was committed are drawn last, above the others.
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


def _line(start: Place, stop: Place, color: str, width: int, dashes: str) -> str:
    """Draws a line that leaves the box at `start` to the right, turns, and enters the one at `stop`."""
    left, right = start[0] * _COLUMN + _BOX[0], stop[0] * _COLUMN
    turn = (left + right) // 2
    top, bottom = (row * _ROW + _ROW // 2 for row in (start[1], stop[1]))
    return (
        f'<path d="M{left} {top}H{turn}V{bottom}H{right}" fill="none" stroke="{color}" stroke-width="{width}" '
        f'stroke-dasharray="{dashes}"/>'
    )


def _box(place: Place, text: str, note: str, color: str, width: int, shade: float = 0.0, dashes: str = "none") -> str:
    left, top = place[0] * _COLUMN, place[1] * _ROW + (_ROW - _BOX[1]) // 2
    middle = left + _BOX[0] // 2
    text = escape(shorten(text, _LONGEST)).replace(" ", "\N{NO-BREAK SPACE}")  # an SVG runs other spaces together
    return (
        f'<rect x="{left}" y="{top}" width="{_BOX[0]}" height="{_BOX[1]}" rx="4" fill="rgba(96,165,250,{shade:.2f})" '
        f'stroke="{color}" stroke-width="{width}" stroke-dasharray="{dashes}"/>'
        f'<text x="{middle}" y="{top + 12}">{text}</text>'
        f'<text x="{middle}" y="{top + 24}" font-size="9" opacity="0.7">{escape(note)}</text>'
    )
