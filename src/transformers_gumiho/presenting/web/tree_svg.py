"""A draft tree as a picture within a web page; it takes about a millisecond, and no library."""

from html import escape

from ..cycles import Cycle
from ..labels import CycleLabels
from ..tree_layout import ACCEPTED, BONUS, DRAFTED, Place, lay_out, shorten


# Pixels.
_ROW, _COLUMN, _BOX = 34, 122, (104, 28)
_MARGIN = 4
_SHADE = "96,165,250"


def tree_svg(cycle: Cycle, labels: CycleLabels) -> str:
    """
    Draws the draft tree of a cycle from the root on the left to its deepest nodes.

    Args:
        cycle: The cycle.
        labels: The texts of its tokens.

    Returns:
        An SVG element.
    """
    layout = lay_out(cycle)
    lines, boxes = [], [_box(layout.places[0], labels.nodes[0], "newest token", "currentColor", 0.0, 2)]
    for node in range(1, len(layout.places)):
        is_accepted, of_path = node in cycle.accepted, cycle.path_probability(node)
        color, width, mark = (ACCEPTED, 2, "✓ ") if is_accepted else (DRAFTED, 1, "")
        place = layout.places[node]
        lines.append((is_accepted, _line(layout.places[cycle.parents[node]], place, color, width)))
        boxes.append(
            _box(place, mark + labels.nodes[node], f"{cycle.token_probability(node):.2f}", color, of_path, width)
        )
    if layout.bonus is not None and labels.bonus is not None:
        lines.append((True, _line(layout.places[cycle.last_accepted], layout.bonus, BONUS, 2, dashes="5 3")))
        boxes.append(_box(layout.bonus, labels.bonus, "the target's own", BONUS, 0.0, 2, dashes="5 3"))
    # Accepted lines are drawn last, above the others.
    drawn = [line for _, line in sorted(lines)] + boxes
    width = layout.num_columns * _COLUMN + 2 * _MARGIN
    height = layout.num_rows * _ROW + 2 * _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gumiho-tree" width="{width}" height="{height}" '
        f'viewBox="{-_MARGIN} {-_MARGIN} {width} {height}" font-family="monospace" font-size="10" '
        f'text-anchor="middle" fill="currentColor">{"".join(drawn)}</svg>'
    )


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
    return (
        f'<rect x="{left}" y="{top}" width="{_BOX[0]}" height="{_BOX[1]}" rx="4" fill="rgba({_SHADE},{shade:.2f})" '
        f'stroke="{color}" stroke-width="{width}" stroke-dasharray="{dashes}"/>'
        f'<text x="{middle}" y="{top + 12}">{escape(shorten(text))}</text>'
        f'<text x="{middle}" y="{top + 24}" font-size="9" opacity="0.7">{escape(note)}</text>'
    )
