"""Benchmark results for people and for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..measuring.conditions import environment
from .modes import PLAIN, PLAIN_COMPILED
from .summary import SummaryRow


_HEADER = (
    "| mode | tokens/s (quartiles) | speed-up (95% interval) | tau micro / macro | draft / verify / rest | "
    "peak memory | equal to plain |"
)


def write_json(rows: Sequence[SummaryRow], path: Path, **facts: Any) -> None:
    """Writes the summary and what it depends on."""
    content = {"environment": environment(), **facts, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def markdown(rows: Sequence[SummaryRow]) -> str:
    """Returns one table per temperature, batch size and category."""
    sections = []
    for section in dict.fromkeys((row.temperature, row.batch_size, row.category) for row in rows):
        temperature, batch_size, category = section
        chosen = [row for row in rows if (row.temperature, row.batch_size, row.category) == section]
        way = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        title = f"### {category}, {way}, batch size {batch_size} ({chosen[0].num_samples} batches)"
        sections.append(
            "\n".join(
                [
                    title,
                    "",
                    _HEADER,
                    "|---" * 7 + "|",
                    *map(_line, chosen),
                    *_sizes(chosen),
                    *_lookup(chosen),
                    *_compiled(chosen),
                ]
            )
        )
    return "\n\n".join(sections) + "\n"


def _sizes(rows: Sequence[SummaryRow]) -> list[str]:
    """Returns how often trees had which size, of the modes in which it changes, and how slow these were at worst."""
    lines = []
    for row in rows:
        sizes = row.cycles_by_size or {}
        if len(sizes) > 1:
            counts = ", ".join(f"{size} ({count})" for size, count in sizes.items())
            lines += ["", f"{row.mode}: drafted tokens per cycle (cycles): {counts}."]
            if row.lowest_speedup is not None:
                lines[-1] += f" Lowest speed-up of a batch: {row.lowest_speedup:.2f}."
    return lines


def _lookup(rows: Sequence[SummaryRow]) -> list[str]:
    """Returns how the modes compare with prompt lookup on the same prompts."""
    shown = [(row.mode, row.speedup_lookup) for row in rows if row.speedup_lookup is not None]
    if not shown:
        return []
    ratios = "; ".join(f"{mode}: {median:.2f} ({lower:.2f}-{upper:.2f})" for mode, (median, lower, upper) in shown)
    return ["", f"Speed on the same prompts, prompt lookup = 1 (95% interval of the median): {ratios}."]


def _compiled(rows: Sequence[SummaryRow]) -> list[str]:
    """Returns what is to be said of compiled modes: their own comparison, and whether shapes stayed the same."""
    shown = [row for row in rows if row.speedup_compiled is not None and row.mode != PLAIN_COMPILED]
    if not shown:
        return []
    ratios = "; ".join(f"{row.mode}: {row.speedup_compiled:.2f} times compiled plain decoding" for row in shown)
    num_compiled = sum(row.num_compiled for row in rows)
    return ["", f"{ratios}. Graphs compiled after warm-up, all modes together: {num_compiled}."]


def _line(row: SummaryRow) -> str:
    lower, median, upper = row.tokens_per_second
    speedup = "1"
    if row.mode != PLAIN:
        speedup = f"{row.speedup:.2f} ({row.speedup_interval[0]:.2f}-{row.speedup_interval[1]:.2f})"
        if row.speedup < 1:
            speedup += " **slower than plain**"
    tau = f"{row.tau_micro:.2f} / {row.tau_macro:.2f}" if row.tau_micro is not None else ""
    shares = ""
    if row.shares is not None:
        shares = " / ".join(f"{row.shares[name]:.0%}" for name in ("draft", "verify", "rest"))
    memory = f"{row.peak_bytes / 1e6:.0f} MB" if row.peak_bytes is not None else ""
    cells = [
        row.mode, f"{median:.1f} ({lower:.1f}-{upper:.1f})", speedup, tau, shares, memory,
        f"{row.num_equal} of {row.num_samples}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"
