"""The samples of a benchmark, and their summary: its numbers, and the report in Markdown."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..measuring.timing import PLAIN
from ..metrics import AcceptanceStatistics, acceptance_statistics


OVERALL = "overall"
_BOOTSTRAP_SAMPLES = 2000
_MIN_SAMPLES = 6  # of a median: the range of five holds it with 94% at most
_HEADER = (
    "| prompts | mode | tokens/s (quartiles) | speed-up (95% interval) | tau (by prompt) | tokens per pass (paused) | "
    "draft / verify / rest | equal to plain |"
)
_COLUMNS = """\
- **tokens/s**: the median over the batches, prompts included, and from six batches on its quartiles.
- **speed-up**: the speed divided by plain decoding's on the same prompts: the median, and from six batches on its 95%
  interval.
- **tau**: tokens that a pass of the target commits if the drafter drafted. In parentheses: the mean over the prompts.
- **tokens per pass**: over all passes, also those without drafts. In parentheses: passes in which the drafter paused.
- **draft / verify / rest**: shares of the time of a cycle.
- **equal to plain**: batches whose texts are all those of plain decoding.
"""
# On an idle machine, two runs of plain decoding differ by at most this factor.
_IDLE_SPREAD = 1.1


@dataclass(frozen=True)
class Sample:
    """
    One batch of prompts, decoded in one `mode`.

    Attributes:
        temperature: 0 is greedy.
        batch_size: Prompts decoded at once; the last one of a `category` may be smaller.
        questions: Names of the questions, in this `turn` of their conversations, counted from 0.
        seconds: Time for decoding the batch, prompt included.
        num_tokens: New tokens of all prompts, without padding.
        equal: Whether every text is that of plain decoding.
        accepted_lengths: As the output of `generate()` has them, like `draft_origins`, if there are cycles.
        break_even: Tokens that a drafted pass had to commit, if the drafter paused.
        stages: Seconds of each stage, if there are cycles.
        repeat_seconds: Time of a second run, for some samples of plain decoding.
    """

    mode: str
    temperature: float
    batch_size: int
    category: str
    questions: list[str]
    turn: int
    seconds: float
    num_tokens: int
    equal: bool
    accepted_lengths: list[list[int]] | None
    stages: dict[str, float] | None
    repeat_seconds: float | None = None
    draft_origins: list[str] | None = None
    break_even: float | None = None

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def prompts(self) -> tuple[float, int, tuple[str, ...], int]:
        """A key that the samples of all modes on the same prompts share."""
        return self.temperature, self.batch_size, tuple(self.questions), self.turn


@dataclass(frozen=True, kw_only=True)
class SummaryRow(AcceptanceStatistics):
    """
    One `mode` in one `category` (or `overall`) at one `temperature` and `batch_size`, and how far its drafts were
    accepted.

    Attributes:
        num_samples: Batches of prompts measured.
        num_equal: Batches in which all texts equal plain decoding's.
        tokens_per_second: Lower quartile, median and upper quartile over the batches.
        speedup: The speed divided by plain decoding's on the same batch: the median over the batches.
        interval: The speed-up's 95% bootstrap interval.
        break_even: Tokens that a drafted pass had to commit, if the drafter paused.
        shares: Shares of `verify`, `draft` and `rest` in the time of a cycle.
        repeat_spread: Upper quartile of the slower time of two plain runs divided by the faster one.
    """

    mode: str
    category: str
    temperature: float
    batch_size: int
    num_samples: int
    num_equal: int
    tokens_per_second: tuple[float, float, float]
    speedup: float
    interval: tuple[float, float]
    break_even: float | None
    shares: dict[str, float] | None
    repeat_spread: float | None


_NO_CYCLES = AcceptanceStatistics(None, None, [], None, 0.0)


def summarize(samples: Sequence[Sample]) -> list[SummaryRow]:
    """Returns a row for each mode, category, temperature and batch size of `samples`."""
    rows = []
    for temperature, batch_size in dict.fromkeys((sample.temperature, sample.batch_size) for sample in samples):
        chosen = [s for s in samples if (s.temperature, s.batch_size) == (temperature, batch_size)]
        categories = list(dict.fromkeys(sample.category for sample in chosen))
        for category in [OVERALL, *(categories if len(categories) > 1 else [])]:
            groups: dict[str, list[Sample]] = defaultdict(list)
            for sample in chosen:
                if category in (OVERALL, sample.category):
                    groups[sample.mode].append(sample)
            rows += [_summarize_mode(groups, mode, category) for mode in groups]
    return rows


def _summarize_mode(groups: Mapping[str, Sequence[Sample]], mode: str, category: str) -> SummaryRow:
    samples = groups[mode]
    plain = {sample.prompts: sample.speed for sample in groups[PLAIN.name]}
    ratios = np.array([sample.speed / plain[sample.prompts] for sample in samples])
    runs = [sorted((sample.seconds, sample.repeat_seconds)) for sample in samples if sample.repeat_seconds]
    lengths = [row for sample in samples for row in sample.accepted_lengths or []]
    origins = [sample.draft_origins or [] for sample in samples for _ in sample.accepted_lengths or []]
    acceptance = acceptance_statistics(lengths, origins) if any(lengths) else _NO_CYCLES
    costs = [sample.break_even for sample in samples if sample.break_even is not None]
    stages = [sample.stages for sample in samples if sample.stages and sample.stages["num_cycles"]]
    seconds = {name: sum(stage[name] for stage in stages) for name in ("verify", "draft", "rest")}
    lower, median, upper = np.percentile([sample.speed for sample in samples], [25, 50, 75])
    return SummaryRow(
        mode=mode,
        category=category,
        temperature=samples[0].temperature,
        batch_size=samples[0].batch_size,
        num_samples=len(samples),
        num_equal=sum(sample.equal for sample in samples),
        tokens_per_second=(float(lower), float(median), float(upper)),
        speedup=float(np.median(ratios)),
        interval=bootstrap_interval(ratios),
        break_even=float(np.median(costs)) if costs else None,
        shares={name: value / sum(seconds.values()) for name, value in seconds.items()} if stages else None,
        repeat_spread=float(np.quantile([slow / fast for fast, slow in runs], 0.75)) if runs else None,
        **vars(acceptance),
    )


def bootstrap_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Returns the 95% bootstrap interval of the median."""
    generator = np.random.default_rng(seed)
    resampled = generator.choice(values, size=(_BOOTSTRAP_SAMPLES, len(values)))
    lower, upper = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    return float(lower), float(upper)


def markdown(rows: Sequence[SummaryRow]) -> str:
    """Returns a table of rows, with notes on the overall ones."""
    lines, notes = [_HEADER, "|---" * 8 + "|"], []
    for section in dict.fromkeys((row.temperature, row.batch_size, row.category) for row in rows):
        temperature, batch_size, category = section
        chosen = [row for row in rows if (row.temperature, row.batch_size, row.category) == section]
        way = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        where = f"{category}, {way}, batch size {batch_size}"
        # The first line of a section names it.
        batches = f"{chosen[0].num_samples} batch{'es' * (chosen[0].num_samples != 1)}"
        titles = [f"{where} ({batches})", *[""] * (len(chosen) - 1)]
        lines += [f"| {title} {_line(row)}" for title, row in zip(titles, chosen, strict=True)]
        if category != OVERALL:
            continue
        notes += [
            f"{where}, {row.mode}: the drafter was paused in {row.paused_share:.0%} of the passes, because a drafted "
            f"pass costs {row.break_even:.1f} steps of plain decoding here. `--break_even 1` never pauses."
            for row in chosen
            if row.break_even is not None
        ]
    if (spread := max(row.repeat_spread or 0.0 for row in rows)) > _IDLE_SPREAD:
        notes.append(
            f"**The machine was not idle:** a repeat of plain decoding took up to {spread:.2f} times as long "
            f"(limit {_IDLE_SPREAD}). Close other programs and begin the benchmark anew with --restart."
        )
    return "\n\n".join(["\n".join(lines), *notes, _COLUMNS])


def _line(row: SummaryRow) -> str:
    lower, median, upper = row.tokens_per_second
    low, high = row.interval
    speed, speedup = f"{median:.1f}", f"{row.speedup:.2f}"
    if row.num_samples >= _MIN_SAMPLES:
        speed += f" ({lower:.1f}-{upper:.1f})"
        speedup += f" ({low:.2f}-{high:.2f})"
    if row.mode == PLAIN.name:
        speedup = "1"
    if round(row.speedup, 2) < 1:
        speedup += " **slower than plain**"
    tau = "" if row.tau_micro is None else f"{row.tau_micro:.2f} ({row.tau_macro:.2f})"
    passes = "" if row.tokens_per_pass is None else f"{row.tokens_per_pass:.2f}"
    passes += f" ({row.paused_share:.0%})" * (row.paused_share > 0)
    shares = row.shares or {}
    times = " / ".join(f"{shares[name]:.0%}" for name in ("draft", "verify", "rest") if name in shares)
    equal = f"{row.num_equal} of {row.num_samples}"
    return f"| {row.mode} | {speed} | {speedup} | {tau} | {passes} | {times} | {equal} |"
