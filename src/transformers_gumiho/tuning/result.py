"""What tuning found, and how it is told."""

from dataclasses import dataclass

from .costs import CycleCosts
from .search import Candidate, DraftTemperature


@dataclass(frozen=True)
class TuningResult:
    """
    Attributes:
        best: The tree that was measured to be fastest, and what was expected of it.
        default: What was expected of the settings that the drafter had.
        measured: Tokens per second of `best`, `default` and plain decoding, measured on the prompts in turns.
        contenders: The trees that were measured, with their tokens per second, the fastest first.
        calibrated: The tree that should be fastest with a draft temperature fitted to each depth.
        constant: The same with one temperature for all depths.
        by_size: The fastest tree of each size, as expected.
        costs: What cycles cost.
    """

    best: Candidate
    default: Candidate
    measured: dict[str, float]
    contenders: list[tuple[Candidate, float]]
    calibrated: Candidate
    constant: Candidate
    by_size: list[Candidate]
    costs: CycleCosts

    @property
    def speculation_pays(self) -> bool:
        """Whether decoding with the drafter was measured to be faster than without."""
        return self.measured["best"] > self.measured["plain"]


def describe(result: TuningResult) -> str:
    """Returns what `gumiho tune` prints."""
    lines = [
        "drafted  verify ms  cycle ms    tau  tokens/s  branching  depth  draft temperature",
        *[_row(result.costs, candidate) for candidate in result.by_size],
        "",
        _calibration(result),
        "",
        "expected  measured  drafted  branching  depth  draft temperature",
        *[_measured_row(candidate, measured) for candidate, measured in result.contenders],
        "",
        # Where the two differ, the machine was not equally fast, and no expectation can hold.
        f"plain decoding: {result.measured['plain']:.1f} tokens/s measured, {1 / result.costs.plain:.1f} when cycles "
        "were timed",
    ]
    for name, which, candidate in (
        ("settings before", "default", result.default),
        ("best settings", "best", result.best),
    ):
        measured = result.measured[which]
        difference = candidate.tokens_per_second / measured - 1
        lines.append(
            f"{name}: {candidate.tokens_per_second:.1f} tokens/s expected, {measured:.1f} measured "
            f"({difference:+.0%}), {measured / result.measured['plain']:.2f} times plain"
        )
    gain = result.measured["best"] / result.measured["default"] - 1
    lines.append(f"the best settings are {gain:+.0%} against those before: {result.best.settings.as_dict()}")
    if not result.speculation_pays:
        lines.append("PLAIN DECODING IS FASTER on this machine: leave `assistant_model` out.")
    return "\n".join(lines)


def _row(costs: CycleCosts, candidate: Candidate) -> str:
    tree = candidate.settings
    return (
        f"{tree.num_assistant_tokens:7d}  {1e3 * costs.verify_seconds(tree.num_assistant_tokens):9.2f}  "
        f"{1e3 * candidate.cycle_seconds:8.2f}  {candidate.tau:5.2f}  {candidate.tokens_per_second:8.1f}  "
        f"{tree.branching_factor:9d}  {tree.tree_depth:5d}  {_temperature(tree.draft_temperature)}"
    )


def _measured_row(candidate: Candidate, measured: float) -> str:
    tree = candidate.settings
    return (
        f"{candidate.tokens_per_second:8.1f}  {measured:8.1f}  {tree.num_assistant_tokens:7d}  "
        f"{tree.branching_factor:9d}  {tree.tree_depth:5d}  {_temperature(tree.draft_temperature)}"
    )


def _calibration(result: TuningResult) -> str:
    calibrated, constant = result.calibrated, result.constant
    gain = calibrated.tokens_per_second / constant.tokens_per_second - 1
    return (
        f"draft temperatures fitted to depths 1, 2, ...: {_temperature(calibrated.settings.draft_temperature)}\n"
        f"expected with them: {calibrated.tokens_per_second:.1f} tokens/s (tau {calibrated.tau:.2f}), with one for "
        f"all depths: {constant.tokens_per_second:.1f} (tau {constant.tau:.2f}); "
        f"they {'help' if gain > 0 else 'do not help'} ({gain:+.1%})"
    )


def _temperature(given: DraftTemperature) -> str:
    return " ".join(f"{value:.2f}" for value in (given if isinstance(given, tuple) else (given,)))
