"""A draft tree as a picture for a document."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from .cycles import Cycle
from .labels import CycleLabels
from .tree_layout import ACCEPTED, BONUS, DRAFTED, lay_out, shorten


# Inches.
_ROW, _COLUMN, _BOX = 0.44, 1.62, (1.3, 0.36)
_MARGIN, _HEADING, _LEGEND = 0.15, 0.35, 0.45


def draw_picture(cycle: Cycle, labels: CycleLabels, temperatures: str, path: str | Path) -> None:
    """
    Draws the draft tree of a cycle from the root on the left to its deepest nodes, the best child of a node beside it.
    The same cycle gives the same file.

    Args:
        cycle: The cycle.
        labels: The texts of its tokens.
        temperatures: The draft temperatures that its probabilities were computed under, as text.
        path: The file to write, .svg or .png.
    """
    layout = lay_out(cycle)
    places = layout.places
    width = max(layout.num_columns * _COLUMN, 5 * _COLUMN) + 2 * _MARGIN
    height = layout.num_rows * _ROW + _HEADING + _LEGEND + 2 * _MARGIN
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-_MARGIN, width - _MARGIN)
    axes.set_ylim(height - _HEADING - _MARGIN, -_HEADING - _MARGIN)
    axes.set_axis_off()

    for node in range(len(places) - 1, 0, -1):
        is_accepted = node in cycle.accepted
        _draw_edge(axes, places[cycle.parents[node]], places[node], ACCEPTED if is_accepted else DRAFTED, is_accepted)
    if layout.bonus is not None and labels.bonus is not None:
        _draw_edge(axes, places[cycle.last_accepted], layout.bonus, BONUS, True, style="--")
        _draw_box(axes, layout.bonus, labels.bonus, "bonus", BONUS, 0.0, is_strong=True, style="--")
    _draw_box(axes, places[0], labels.nodes[0], "newest token", "black", 0.0, is_strong=True)
    for node in range(1, len(places)):
        is_accepted, of_path = node in cycle.accepted, cycle.path_probability(node)
        numbers = f"{cycle.token_probability(node):.3f}   {of_path:.3f}"
        mark, color = ("✓ ", ACCEPTED) if is_accepted else ("", DRAFTED)
        _draw_box(axes, places[node], mark + labels.nodes[node], numbers, color, of_path, is_strong=is_accepted)

    _write(axes, 0, -_HEADING + 0.08, f"after {labels.context}", size=8, family="monospace")
    _write(
        axes, 0, layout.num_rows * _ROW + 0.12,
        "In a box: the probability of the token after those before it, and of its path (the shade) at "
        f"draft temperature {temperatures}.\n"
        "✓ accepted draft.   Dashed: the bonus token, which the target chose.   "
        f"{len(places) - 1} tokens drafted, {len(cycle.accepted)} accepted (expected: {cycle.expected_accepted:.2f}), "
        f"{len(cycle.committed)} committed.",
        size=7.5,
    )  # fmt: skip
    # Letters stay letters in an SVG, which is then small, and can be searched. By default it would hold the time,
    # and random names.
    metadata = {"Date": None} if Path(path).suffix == ".svg" else None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gumiho"}):
        figure.savefig(path, dpi=150, facecolor="white", metadata=metadata)


def _draw_edge(
    axes: Axes, start: tuple[int, int], stop: tuple[int, int], color: str, is_strong: bool, style: str = "-"
) -> None:
    """Draws a line that leaves the box at `start` to the right, turns, and enters the one at `stop`."""
    left, right = start[0] * _COLUMN + _BOX[0], stop[0] * _COLUMN
    turn = (left + right) / 2
    top, bottom = ((row + 0.5) * _ROW for row in (start[1], stop[1]))
    axes.plot(
        [left, turn, turn, right], [top, top, bottom, bottom], style, color=color,
        linewidth=2.0 if is_strong else 0.8, zorder=2 if is_strong else 1, solid_joinstyle="round",
    )  # fmt: skip


def _draw_box(
    axes: Axes,
    place: tuple[int, int],
    text: str,
    numbers: str,
    color: str,
    shade: float,
    *,
    is_strong: bool,
    style: str = "-",
) -> None:
    left, top = place[0] * _COLUMN, place[1] * _ROW + (_ROW - _BOX[1]) / 2
    face = tuple(1 - 0.55 * shade * (1 - part) for part in to_rgb("#60a5fa"))
    corners = ([left, left + _BOX[0], left + _BOX[0], left], [top, top, top + _BOX[1], top + _BOX[1]])
    axes.fill(
        *corners, facecolor=face, edgecolor=color, linewidth=1.8 if is_strong else 0.8, linestyle=style, zorder=3
    )
    middle = left + _BOX[0] / 2
    _write(axes, middle, top + 0.12, shorten(text), size=8, align="center", family="monospace")
    _write(axes, middle, top + 0.275, numbers, size=6.5, align="center")


def _write(
    axes: Axes, x: float, y: float, text: str, *, size: float, align: str = "left", family: str = "sans-serif"
) -> None:
    vertical = "center" if align == "center" else "top"
    # A token may hold a dollar sign, which is no formula.
    axes.text(x, y, text, size=size, ha=align, va=vertical, family=family, zorder=4, parse_math=False)
