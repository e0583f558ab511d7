"""Benchmark results as Markdown."""

from collections.abc import Sequence

from ..measuring.modes import PLAIN
from .summary import SummaryRow


_HEADER = (
    "| mode | tokens/s (quartiles) | speed-up (95% interval) | tau micro / macro | draft / verify / rest | "
    "peak memory | equal to plain |"
)
# On an idle machine, two runs of plain decoding differ by at most this factor.
_IDLE_SPREAD = 1.1


def markdown(rows: Sequence[SummaryRow]) -> str:
    """Returns one table per temperature, batch size and category."""
    sections = []
    for section in dict.fromkeys((row.temperature, row.batch_size, row.category) for row in rows):
        temperature, batch_size, category = section
        chosen = [row for row in rows if (row.temperature, row.batch_size, row.category) == section]
        way = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        title = f"### {category}, {way}, batch size {batch_size} ({chosen[0].num_samples} batches)"
        lines = [title, "", _HEADER, "|---" * 7 + "|", *map(_line, chosen), *_comparisons(chosen)]
        if (spread := max(row.repeat_spread or 0.0 for row in chosen)) > _IDLE_SPREAD:
            lines += [
                "",
                f"**The machine was not idle:** a repeat of plain decoding took up to {spread:.2f} times as long "
                f"(limit {_IDLE_SPREAD}). Close other programs and run the benchmark again.",
            ]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def _comparisons(rows: Sequence[SummaryRow]) -> list[str]:
    """Returns a line for each baseline with which modes are compared, answer by answer."""
    lines = []
    for baseline in dict.fromkeys(name for row in rows for name in row.against):
        found = [(row.mode, row.against[baseline]) for row in rows if baseline in row.against]
        ratios = "; ".join(
            f"{mode} {of.ratio:.2f} ({of.interval[0]:.2f}-{of.interval[1]:.2f}), faster in {of.num_faster} of "
            f"{of.num_samples}"
            for mode, of in found
        )
        lines += ["", f"Speed against {baseline} on the same prompts (median, its 95% interval): {ratios}."]
    return lines


def _line(row: SummaryRow) -> str:
    lower, median, upper = row.tokens_per_second
    speedup = "1"
    if row.mode != PLAIN.name:
        speedup = f"{row.speedup:.2f} ({row.speedup_interval[0]:.2f}-{row.speedup_interval[1]:.2f})"
        if row.speedup < 1:
            speedup += " **slower than plain**"
    tau = f"{row.tau_micro:.2f} / {row.tau_macro:.2f}" if row.tau_micro is not None else ""
    shares = ""
    if row.shares is not None:
        shares = " / ".join(f"{row.shares[name]:.0%}" for name in ("draft", "verify", "rest"))
    # On a CPU, what a call needs is often memory that the process already has.
    memory = f"{row.peak_bytes / 1e6:.0f} MB" if row.peak_bytes is not None and row.peak_bytes >= 0.5e6 else ""
    cells = [
        row.mode, f"{median:.1f} ({lower:.1f}-{upper:.1f})", speedup, tau, shares, memory,
        f"{row.num_equal} of {row.num_samples}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"
