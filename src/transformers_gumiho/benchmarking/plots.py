"""Pictures of benchmark results."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from .modes import tree_size
from .summary import OVERALL, SummaryRow


matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402


def plot_summary(rows: Sequence[SummaryRow], folder: Path) -> list[Path]:
    """Writes the pictures of a summary into `folder`; returns their paths."""
    written = []
    for temperature, batch_size in dict.fromkeys((row.temperature, row.batch_size) for row in rows):
        chosen = [row for row in rows if (row.temperature, row.batch_size) == (temperature, batch_size)]
        suffix = f"t{temperature:g}-b{batch_size}"
        for name, draw in (("speedup", plot_speedups), ("acceptance", plot_acceptance), ("cycle", plot_cycles)):
            path = folder / f"{name}-{suffix}.png"
            draw(chosen, path)
            written.append(path)
        if any(tree_size(row.mode) for row in chosen):
            written.append(folder / f"trees-{suffix}.png")
            plot_tree_sizes(chosen, written[-1])
    return written


def plot_tree_sizes(rows: Sequence[SummaryRow], path: Path) -> None:
    """Draws tau and the speed-up against the number of drafted tokens."""
    chosen = [(tree_size(row.mode), row.tau_micro, row.speedup) for row in rows if row.category == OVERALL]
    points = np.array([point for point in chosen if None not in point], dtype=float)
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(points[:, 0], points[:, 1], marker="o", label="tau")
    axes.plot(points[:, 0], points[:, 2], marker="s", label="speed-up")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("drafted tokens per cycle")
    axes.legend()
    _save(figure, path)


def plot_speedups(rows: Sequence[SummaryRow], path: Path) -> None:
    """Draws bars of the speed-up of every mode, with its interval, by category."""
    categories = list(dict.fromkeys(row.category for row in rows))
    modes = list(dict.fromkeys(row.mode for row in rows))
    figure, axes = plt.subplots(figsize=(2 + 1.1 * len(categories) * max(len(modes), 3) / 3, 4.5))
    width = 0.85 / len(modes)
    for index, mode in enumerate(modes):
        found = {row.category: row for row in rows if row.mode == mode}
        places = [place + (index - len(modes) / 2) * width for place, c in enumerate(categories) if c in found]
        values = np.array([found[c].speedup for c in categories if c in found])
        intervals = np.array([found[c].speedup_interval for c in categories if c in found]).T
        axes.bar(places, values, width, label=mode, yerr=np.abs(intervals - values), capsize=2)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(categories)), categories)
    axes.set_ylabel("speed-up over plain decoding")
    axes.legend(fontsize="small")
    _save(figure, path)


def plot_acceptance(rows: Sequence[SummaryRow], path: Path) -> None:
    """Draws, for every mode that drafts, the share of cycles that accept at least so many tokens."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for row in rows:
        if row.category == OVERALL and row.acceptance_per_position:
            positions = range(1, len(row.acceptance_per_position) + 1)
            axes.plot(
                positions, row.acceptance_per_position, marker="o", label=f"{row.mode} (tau {row.tau_micro:.2f})"
            )
    axes.set_xlabel("draft position")
    axes.set_ylabel("share of cycles that accept it")
    axes.set_ylim(0, 1)
    axes.legend(fontsize="small")
    _save(figure, path)


def plot_cycles(rows: Sequence[SummaryRow], path: Path) -> None:
    """Draws where the time of a cycle goes, as stacked bars."""
    chosen = [(row.mode, row.shares, row.seconds_per_cycle or 0) for row in rows if row.category == OVERALL]
    shown = [(mode, shares, seconds) for mode, shares, seconds in chosen if shares is not None]
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.5 * max(len(shown), 2)))
    left = np.zeros(len(shown))
    for stage in ("verify", "draft", "rest"):
        values = np.array([1000 * seconds * shares[stage] for _, shares, seconds in shown])
        axes.barh([mode for mode, _, _ in shown], values, left=left, label=stage)
        left += values
    axes.set_xlabel("milliseconds per cycle")
    axes.legend(fontsize="small")
    _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
