"""The samples of a benchmark, and their summary: its numbers, and the report in Markdown."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..measuring.turns import PLAIN
from ..metrics import acceptance_statistics
from .modes import ASSISTED, COMPILED, PLAIN_COMPILED, PROMPT_LOOKUP


OVERALL = "overall"
_BASELINES = (PROMPT_LOOKUP, ASSISTED, PLAIN_COMPILED)
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
    One batch of prompts, decoded in one mode.

    Attributes:
        mode: The name of the mode.
        temperature: 0 is greedy.
        batch_size: Prompts decoded at once; the last batch of a category may have fewer.
        category: Category of the questions.
        questions: Names of the questions.
        turn: Index of the turn in the conversations, from 0.
        seconds: Time for decoding the batch, prompt included.
        num_tokens: New tokens of all prompts, without padding.
        equal: Whether every text is that of plain decoding.
        accepted_lengths: For each prompt, the tokens that each verification cycle committed, if there are cycles.
        draft_origins: For each cycle, where its drafts came from. By default the drafter's.
        break_even: Tokens that a drafted pass had to commit, if the drafter paused.
        stages: Seconds of each stage, if there are any. On other devices than a CPU, these are from a separate run.
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


@dataclass(frozen=True)
class Comparison:
    """
    The speed of a mode divided by the speed of a baseline on the same batch: the median over the batches that both
    decoded (`ratio`), its 95% bootstrap `interval`, and in how many of them (`num_samples`) the mode was faster.
    """

    ratio: float
    interval: tuple[float, float]
    num_faster: int
    num_samples: int


@dataclass(frozen=True)
class SummaryRow:
    """
    One mode in one category.

    Attributes:
        mode: Its name.
        category: Its name, or `overall`.
        temperature: 0 is greedy.
        batch_size: Prompts decoded at once.
        num_samples: Batches of prompts measured.
        num_equal: Number of these batches in which all texts equal those of plain decoding.
        tokens_per_second: Lower quartile, median and upper quartile over the batches.
        with_plain: The comparison with plain decoding.
        against: Comparisons with prompt lookup and assisted generation, by their names. For compiled modes, also with
            compiled plain decoding.
        tau_micro: Tokens per drafted cycle; `None` without one.
        tau_macro: Tokens per drafted cycle of each prompt, averaged over the prompts.
        acceptance_per_position: Share of drafted cycles in which at least 1, 2, ... drafted tokens were accepted.
        tokens_per_pass: Tokens per pass, over all passes after the prefill; `None` without cycles.
        paused_share: Share of these passes in which the drafter was paused.
        break_even: Tokens that a drafted pass had to commit, if the drafter paused.
        shares: Shares of `verify`, `draft` and `rest` in the time of a cycle.
        repeat_spread: For plain decoding, the slower time of two runs of a batch divided by the faster one, as the
            upper quartile. On an idle machine it is close to 1.
    """

    mode: str
    category: str
    temperature: float
    batch_size: int
    num_samples: int
    num_equal: int
    tokens_per_second: tuple[float, float, float]
    with_plain: Comparison
    against: dict[str, Comparison]
    tau_micro: float | None
    tau_macro: float | None
    acceptance_per_position: list[float] | None
    tokens_per_pass: float | None
    paused_share: float
    break_even: float | None
    shares: dict[str, float] | None
    repeat_spread: float | None

    @property
    def speedup(self) -> float:
        """The speed divided by plain decoding's on the same batch: the median over the batches."""
        return self.with_plain.ratio


def summarize(samples: Sequence[Sample]) -> list[SummaryRow]:
    """Returns a row for each mode, category, temperature and batch size of `samples`, and one over all categories."""
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
    is_baseline = mode in (PLAIN.name, *_BASELINES)
    baselines = [name for name in _BASELINES if name != PLAIN_COMPILED or mode.endswith(COMPILED)]
    runs = [sorted((sample.seconds, sample.repeat_seconds)) for sample in samples if sample.repeat_seconds]
    lengths = [row for sample in samples for row in sample.accepted_lengths or []]
    origins = [sample.draft_origins for sample in samples for _ in sample.accepted_lengths or []]
    acceptance = None
    if any(lengths):
        acceptance = acceptance_statistics(
            lengths, draft_origins=[of or ["drafter"] * len(row) for of, row in zip(origins, lengths, strict=True)]
        )
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
        with_plain=_compare(samples, groups[PLAIN.name]),
        against={name: _compare(samples, groups[name]) for name in baselines if name in groups and not is_baseline},
        tau_micro=acceptance.tau_micro if acceptance else None,
        tau_macro=acceptance.tau_macro if acceptance else None,
        acceptance_per_position=acceptance.acceptance_per_position if acceptance else None,
        tokens_per_pass=acceptance.tokens_per_pass if acceptance else None,
        paused_share=acceptance.paused_share if acceptance else 0.0,
        break_even=float(np.median(costs)) if costs else None,
        shares={name: value / sum(seconds.values()) for name, value in seconds.items()} if stages else None,
        repeat_spread=float(np.quantile([slow / fast for fast, slow in runs], 0.75)) if runs else None,
    )


def _compare(samples: Sequence[Sample], others: Sequence[Sample]) -> Comparison:
    """Compares the speeds of samples with those of others on the same prompts."""
    speeds = {other.prompts: other.speed for other in others}
    ratios = np.array([s.speed / speeds[s.prompts] for s in samples if s.prompts in speeds])
    return Comparison(float(np.median(ratios)), bootstrap_interval(ratios), int((ratios > 1).sum()), len(ratios))


def bootstrap_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Returns the bootstrap interval of the median of `values` that holds 95% of the resampled medians."""
    generator = np.random.default_rng(seed)
    resampled = generator.choice(values, size=(_BOOTSTRAP_SAMPLES, len(values)))
    lower, upper = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    return float(lower), float(upper)


def markdown(rows: Sequence[SummaryRow]) -> str:
    """Returns a table with the modes of each category, temperature and batch size, and notes on the overall ones."""
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
        # Each baseline with which modes are compared, answer by answer.
        for baseline in dict.fromkeys(name for row in chosen for name in row.against):
            found = [(row.mode, row.against[baseline]) for row in chosen if baseline in row.against]
            ratios = [f"{mode} {_ratio(of)}, faster in {of.num_faster} of {of.num_samples}" for mode, of in found]
            of_all = "; ".join(ratios)
            notes.append(f"{where}: speed against {baseline} on the same prompts (median, 95% interval): {of_all}.")
    if (spread := max(row.repeat_spread or 0.0 for row in rows)) > _IDLE_SPREAD:
        notes.append(
            f"**The machine was not idle:** a repeat of plain decoding took up to {spread:.2f} times as long "
            f"(limit {_IDLE_SPREAD}). Close other programs and begin the benchmark anew with --restart."
        )
    return "\n\n".join(["\n".join(lines), *notes, _COLUMNS])


def _ratio(comparison: Comparison) -> str:
    low, high = comparison.interval
    return f"{comparison.ratio:.2f}" + f" ({low:.2f}-{high:.2f})" * (comparison.num_samples >= _MIN_SAMPLES)


def _line(row: SummaryRow) -> str:
    lower, median, upper = row.tokens_per_second
    speed = f"{median:.1f}" + f" ({lower:.1f}-{upper:.1f})" * (row.num_samples >= _MIN_SAMPLES)
    speedup = "1" if row.mode == PLAIN.name else _ratio(row.with_plain)
    if round(row.speedup, 2) < 1:
        speedup += " **slower than plain**"
    tau = "" if row.tau_micro is None else f"{row.tau_micro:.2f} ({row.tau_macro:.2f})"
    passes = "" if row.tokens_per_pass is None else f"{row.tokens_per_pass:.2f}"
    passes += f" ({row.paused_share:.0%})" * (row.paused_share > 0)
    shares = row.shares or {}
    times = " / ".join(f"{shares[name]:.0%}" for name in ("draft", "verify", "rest") if name in shares)
    equal = f"{row.num_equal} of {row.num_samples}"
    return f"| {row.mode} | {speed} | {speedup} | {tau} | {passes} | {times} | {equal} |"
