"""Pictures of benchmark results."""

from collections.abc import Sequence
from itertools import cycle, zip_longest
from pathlib import Path

import matplotlib
import numpy as np

from .summary import OVERALL, SummaryRow


matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator


_PANELS_IN_A_LINE = 3


def plot_summary(rows: Sequence[SummaryRow], folder: Path) -> None:
    """Writes pictures of the speed-ups and of the acceptance into `folder`, for each temperature and batch size."""
    for temperature, batch_size in dict.fromkeys((row.temperature, row.batch_size) for row in rows):
        chosen = [row for row in rows if (row.temperature, row.batch_size) == (temperature, batch_size)]
        for name, draw in (("speedup", _draw_speedups), ("acceptance", _draw_acceptance)):
            figure = draw(chosen)
            figure.savefig(folder / f"{name}-t{temperature:g}-b{batch_size}.png", dpi=150)
            plt.close(figure)


def _draw_speedups(rows: Sequence[SummaryRow]) -> plt.Figure:
    """Draws bars of the speed-up of every mode, with its interval: a panel for each category."""
    colors = _colors(rows)
    categories = list(dict.fromkeys(row.category for row in rows))
    columns = min(len(categories), _PANELS_IN_A_LINE)
    lines = -(-len(categories) // columns)
    figure, grid = plt.subplots(
        lines, columns, sharex=True, sharey=True, squeeze=False, layout="constrained",
        figsize=(2 + 3 * columns, lines * (0.8 + 0.28 * len(colors))),
    )  # fmt: skip
    for axes, category in zip_longest(grid.flat, categories):
        axes.set_visible(category is not None)
        # A mode that does not support this batch size has an empty place.
        for row in (row for row in rows if row.category == category):
            place = list(colors).index(row.mode)
            error = np.abs(np.array(row.speedup_interval) - row.speedup)[:, None]
            axes.barh(place, row.speedup, color=colors[row.mode], xerr=error, capsize=2, error_kw={"linewidth": 1})
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(range(len(colors)), list(colors))
        axes.set_title(category, fontsize="medium")
        axes.tick_params(labelbottom=True)
    grid[0, 0].invert_yaxis()  # plain decoding on top; the panels share the axis
    figure.supxlabel("speed-up over plain decoding", fontsize="medium")
    return figure


def _draw_acceptance(rows: Sequence[SummaryRow]) -> plt.Figure:
    """Draws, for every mode that drafts, the share of cycles that accept the draft at each position."""
    colors = _colors(rows)
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    drafting = [row for row in rows if row.category == OVERALL and row.acceptance_per_position]
    for index, row in enumerate(drafting):
        accepted = row.acceptance_per_position or []
        # Lines of two modes may coincide: every second line is dashed, so that both are visible.
        style, size = ("s--", 4) if index % 2 else ("o-", 7)
        label = f"{row.mode} (tau {row.tau_micro:.2f})"
        axes.plot(range(1, len(accepted) + 1), accepted, style, markersize=size, color=colors[row.mode], label=label)
    axes.set_xlabel("draft position")
    axes.set_ylabel("share of cycles that accept it")
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if drafting:
        figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _colors(rows: Sequence[SummaryRow]) -> dict[str, tuple[float, ...]]:
    """Returns a color for each mode, the same in all pictures of these rows."""
    shades = matplotlib.colormaps["tab20"]
    # Strong and pale shades alternate in this map; the strong ones are used first.
    numbers = cycle([*range(0, shades.N, 2), *range(1, shades.N, 2)])
    modes = dict.fromkeys(row.mode for row in rows)
    return {mode: shades(number) for mode, number in zip(modes, numbers, strict=False)}
