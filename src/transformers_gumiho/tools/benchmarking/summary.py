"""The samples of a benchmark, and their summary as the numbers of the report."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..measuring.modes import PLAIN
from ..metrics import acceptance_statistics
from .modes import ASSISTED, COMPILED, PLAIN_COMPILED, PROMPT_LOOKUP


OVERALL = "overall"
_BASELINES = (PROMPT_LOOKUP, ASSISTED, PLAIN_COMPILED)
_BOOTSTRAP_SAMPLES = 2000


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
        peak_bytes: Peak of the memory, beyond the memory in use before; `None` if the system does not report it.
        accepted_lengths: For each prompt, the tokens that each verification cycle committed, if there are cycles.
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
    peak_bytes: int | None
    accepted_lengths: list[list[int]] | None
    stages: dict[str, float] | None
    repeat_seconds: float | None = None

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
    The speed of a mode divided by the speed of a baseline on the same batch.

    Attributes:
        ratio: Median over the batches.
        interval: Its 95% bootstrap interval.
        num_faster: Batches in which the mode was faster.
        num_samples: Batches that both modes decoded.
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
        speedup: Median over the batches of the speed divided by plain's on the same batch.
        speedup_interval: Its 95% bootstrap interval.
        tau_micro: Tokens per cycle, over all cycles; `None` without cycles.
        tau_macro: Tokens per cycle of each prompt, averaged over the prompts.
        acceptance_per_position: Share of cycles in which at least 1, 2, ... drafted tokens were accepted.
        shares: Shares of `verify`, `draft` and `rest` in the time of a cycle.
        peak_bytes: Peak memory, as the median over the batches.
        against: Comparisons with prompt lookup and assisted generation, by their names. For compiled modes, also with
            compiled plain decoding.
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
    speedup: float
    speedup_interval: tuple[float, float]
    tau_micro: float | None
    tau_macro: float | None
    acceptance_per_position: list[float] | None
    shares: dict[str, float] | None
    peak_bytes: float | None
    against: dict[str, Comparison] = field(default_factory=dict)
    repeat_spread: float | None = None


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
    with_plain = _compare(samples, groups[PLAIN.name])
    is_baseline = mode in (PLAIN.name, *_BASELINES)
    baselines = [name for name in _BASELINES if name != PLAIN_COMPILED or mode.endswith(COMPILED)]
    against = {name: _compare(samples, groups[name]) for name in baselines if name in groups and not is_baseline}
    runs = [sorted((sample.seconds, sample.repeat_seconds)) for sample in samples if sample.repeat_seconds]
    lengths = [row for sample in samples for row in sample.accepted_lengths or []]
    acceptance = acceptance_statistics(lengths) if any(lengths) else None
    stages = [sample.stages for sample in samples if sample.stages and sample.stages["num_cycles"]]
    seconds = {name: sum(stage[name] for stage in stages) for name in ("verify", "draft", "rest")}
    peaks = [sample.peak_bytes for sample in samples if sample.peak_bytes is not None]
    lower, median, upper = np.percentile([sample.speed for sample in samples], [25, 50, 75])
    return SummaryRow(
        mode=mode,
        category=category,
        temperature=samples[0].temperature,
        batch_size=samples[0].batch_size,
        num_samples=len(samples),
        num_equal=sum(sample.equal for sample in samples),
        tokens_per_second=(float(lower), float(median), float(upper)),
        speedup=with_plain.ratio,
        speedup_interval=with_plain.interval,
        tau_micro=acceptance.tau_micro if acceptance else None,
        tau_macro=acceptance.tau_macro if acceptance else None,
        acceptance_per_position=acceptance.acceptance_per_position if acceptance else None,
        shares={name: value / sum(seconds.values()) for name, value in seconds.items()} if stages else None,
        peak_bytes=float(np.median(peaks)) if peaks else None,
        against=against,
        repeat_spread=float(np.quantile([slow / fast for fast, slow in runs], 0.75)) if runs else None,
    )


def _compare(samples: Sequence[Sample], others: Sequence[Sample]) -> Comparison:
    """Compares the speeds of samples with those of others on the same prompts."""
    speeds = {other.prompts: other.speed for other in others}
    ratios = np.array([s.speed / speeds[s.prompts] for s in samples if s.prompts in speeds])
    return Comparison(float(np.median(ratios)), bootstrap_interval(ratios), int((ratios > 1).sum()), len(ratios))


def bootstrap_interval(values: np.ndarray, share: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Returns the bootstrap interval of the median of `values` that holds `share` of the resampled medians."""
    generator = np.random.default_rng(seed)
    resampled = generator.choice(values, size=(_BOOTSTRAP_SAMPLES, len(values)))
    lower, upper = np.quantile(np.median(resampled, axis=1), [(1 - share) / 2, (1 + share) / 2])
    return float(lower), float(upper)
