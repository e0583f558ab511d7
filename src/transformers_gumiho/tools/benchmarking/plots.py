"""Pictures of benchmark results."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import matplotlib
import numpy as np

from .summary import SummaryRow


matplotlib.use("Agg")

from matplotlib import pyplot as plt


_PANELS_IN_A_LINE = 3


def plot_summary(rows: Sequence[SummaryRow], folder: Path) -> None:
    """Writes a picture of the speed-ups into `folder`, for each temperature and batch size."""
    for temperature, batch_size in dict.fromkeys((row.temperature, row.batch_size) for row in rows):
        figure = _draw([row for row in rows if (row.temperature, row.batch_size) == (temperature, batch_size)])
        figure.savefig(folder / f"speedup-t{temperature:g}-b{batch_size}.png", dpi=150)
        plt.close(figure)


def _draw(rows: Sequence[SummaryRow]) -> plt.Figure:
    """Draws bars of the speed-up of every mode, with its interval: a panel for each category."""
    categories = list(dict.fromkeys(row.category for row in rows))
    modes = list(dict.fromkeys(row.mode for row in rows))
    columns = min(len(categories), _PANELS_IN_A_LINE)
    lines = -(-len(categories) // columns)
    figure, grid = plt.subplots(
        lines, columns, sharex=True, sharey=True, squeeze=False, layout="constrained",
        figsize=(2 + 3 * columns, lines * (0.8 + 0.28 * len(modes))),
    )  # fmt: skip
    for axes, category in zip_longest(grid.flat, categories):
        axes.set_visible(category is not None)
        # A mode that does not support this batch size has an empty place.
        for row in (row for row in rows if row.category == category):
            error = np.abs(np.array(row.with_plain.interval) - row.speedup)[:, None]
            axes.barh(modes.index(row.mode), row.speedup, xerr=error, capsize=2, error_kw={"linewidth": 1})
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(range(len(modes)), modes)
        axes.set_title(category, fontsize="medium")
        axes.tick_params(labelbottom=True)
    grid[0, 0].invert_yaxis()  # plain decoding on top; the panels share the axis
    figure.supxlabel("speed-up over plain decoding", fontsize="medium")
    return figure
