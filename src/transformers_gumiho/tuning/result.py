"""What tuning found, and how it is told."""

from dataclasses import dataclass
from typing import Any

from ..model.cycle_costs import CycleCostTable, Numbers
from .costs import CycleCosts
from .search import Candidate, DraftTemperature
from .sizes import FittedSizes
from .vocabulary import VocabularyCandidate, VocabularyChoice


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
        vocabulary: The tokens to draft the best tree from; `None` where the drafter keeps those it has.
        sizes: What cycles cost, and how sizes that fit them did; `None` where the size stays fixed.
    """

    best: Candidate
    default: Candidate
    measured: dict[str, float]
    contenders: list[tuple[Candidate, float]]
    calibrated: Candidate
    constant: Candidate
    by_size: list[Candidate]
    costs: CycleCosts
    vocabulary: VocabularyChoice | None = None
    sizes: FittedSizes | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What was found to be fastest, as fields of a generation config, in numbers and lists."""
        found = self.best.settings.as_dict()
        vocabulary = {"draft_vocabulary": self.vocabulary.chosen.token_ids} if self.vocabulary else {}
        # A table that the drafter had is of another tree.
        return found | vocabulary | (self.sizes.settings if self.sizes else {"cycle_costs": None})

    def expected_speed(self, candidate: Candidate) -> float:
        """
        Returns the tokens per second to expect of `candidate` while plain decoding is as fast as it was measured to
        be. Cycles are timed before that, and a machine's speed changes within minutes: what can be foretold is how
        many times as fast as plain decoding a tree is.
        """
        return candidate.tokens_per_second * self.costs.plain * self.measured["plain"]

    @property
    def speculation_pays(self) -> bool:
        """Whether decoding with the drafter was measured to be faster than without, in the last contest there was."""
        if self.sizes is not None:
            return max(self.sizes.fixed_speed, *self.sizes.measured.values()) > self.sizes.plain
        last = self.vocabulary
        if last is not None and last.plain is not None:
            return last.measured[last.chosen] > last.plain
        return self.measured["best"] > self.measured["plain"]


def describe(result: TuningResult) -> str:
    """Returns what `gumiho tune` prints of a `result`."""
    lines = [
        "drafted  verify ms  cycle ms    tau  tokens/s  branching  depth  draft temperature",
        *[_row(result.costs, candidate) for candidate in result.by_size],
        "",
        _calibration(result),
        "",
        _plain(result.measured["plain"], result.costs.plain),
        "expected  measured  drafted  branching  depth  draft temperature",
        *[_measured_row(result, candidate, measured) for candidate, measured in result.contenders],
        "",
    ]
    for name, which, candidate in (
        ("settings before", "default", result.default),
        ("best settings", "best", result.best),
    ):
        measured = result.measured[which]
        expected = result.expected_speed(candidate)
        lines.append(
            f"{name}: {expected:.1f} tokens/s expected, {measured:.1f} measured "
            f"({expected / measured - 1:+.0%}), {measured / result.measured['plain']:.2f} times plain"
        )
    gain = result.measured["best"] / result.measured["default"] - 1
    lines.append(f"the best settings are {gain:+.0%} against those before: {result.best.settings.as_dict()}")
    lines += ["", *_vocabulary(result.vocabulary)]
    if result.sizes is not None:
        lines += ["", *_sizes(result.sizes)]
    if not result.speculation_pays:
        lines.append("PLAIN DECODING IS FASTER on this machine: leave `assistant_model` out.")
    return "\n".join(lines)


def _sizes(sizes: FittedSizes) -> list[str]:
    table = sizes.table
    speeds = ", ".join(f"{speed:.1f} tokens/s up to {size} drafted" for size, speed in sizes.measured.items())
    gain = sizes.measured[sizes.largest] / sizes.fixed_speed - 1
    return [
        "milliseconds of a target's pass, by rows and drafted tokens, and of a step of plain decoding",
        *_by_rows(table, table.verify_ms, table.plain_ms),
        "of drafting, and all else in a cycle",
        *_by_rows(table, table.draft_ms),
        *([] if table.sampled_draft_ms is None else [
            "of these, and a step of plain decoding, where tokens are sampled",
            *_by_rows(table, table.sampled_draft_ms, table.sampled_plain_ms),
        ]),
        f"sizes that fit each cycle: {speeds}; always {sizes.fixed}: {sizes.fixed_speed:.1f}, plain "
        f"decoding: {sizes.plain:.1f}; fitting gains {gain:+.1%}{'' if sizes.pays else ', so the size stays fixed'}",
    ]  # fmt: skip


def _by_rows(table: CycleCostTable, of_sizes: tuple[Numbers, ...], plain: Numbers | None = None) -> list[str]:
    """Returns a line for each batch size, with a column for each tree size, and one for plain decoding."""
    lines = [
        [f"{rows:4d} ", *(f"{ms:7.2f}" for ms in row)] for rows, row in zip(table.batch_sizes, of_sizes, strict=True)
    ]
    header = ["rows ", *(f"{size:7d}" for size in table.tree_sizes)]
    if plain is not None:
        lines = [[*line, f"{ms:8.2f}"] for line, ms in zip(lines, plain, strict=True)]
        header.append(f"{'plain':>8}")
    return [" ".join(line) for line in [header, *lines]]


def _plain(measured: float, step_seconds: float) -> str:
    return (
        f"plain decoding: {measured:.1f} tokens/s measured, {1 / step_seconds:.1f} when cycles were timed; what is "
        "expected from here on is scaled to the former"
    )


def _row(costs: CycleCosts, candidate: Candidate) -> str:
    tree = candidate.settings
    return (
        f"{tree.num_assistant_tokens:7d}  {1e3 * costs.verify_seconds(tree.num_assistant_tokens):9.2f}  "
        f"{1e3 * candidate.cycle_seconds:8.2f}  {candidate.tau:5.2f}  {candidate.tokens_per_second:8.1f}  "
        f"{tree.branching_factor:9d}  {tree.tree_depth:5d}  {_temperature(tree.draft_temperature)}"
    )


def _measured_row(result: TuningResult, candidate: Candidate, measured: float) -> str:
    tree = candidate.settings
    return (
        f"{result.expected_speed(candidate):8.1f}  {measured:8.1f}  {tree.num_assistant_tokens:7d}  "
        f"{tree.branching_factor:9d}  {tree.tree_depth:5d}  {_temperature(tree.draft_temperature)}"
    )


def _calibration(result: TuningResult) -> str:
    calibrated, constant = result.calibrated, result.constant
    gain = calibrated.tokens_per_second / constant.tokens_per_second - 1
    return (
        f"draft temperatures fitted to depths 1, 2, ...: {_temperature(calibrated.settings.draft_temperature)}\n"
        f"expected with them: {calibrated.tokens_per_second:.1f} tokens/s (tau {calibrated.tau:.2f}), with one for "
        f"all depths: {constant.tokens_per_second:.1f} (tau {constant.tau:.2f}); "
        f"they {'help' if gain >= 5e-4 else 'do not help'} ({gain:+.1%})"
    )


def _vocabulary(choice: VocabularyChoice | None) -> list[str]:
    if choice is None:
        return ["draft vocabulary: as before, nothing else was measured"]
    rows = [_vocabulary_row(choice, candidate) for candidate in choice.candidates]
    return [
        "draft vocabularies, each prompt with tokens counted on the other half of the prompts and answers",
        *([] if choice.plain is None else [_plain(choice.plain, choice.step_seconds)]),
        " tokens    tau  tau lost  cycle ms  expected  measured",
        *rows,
        f"best draft vocabulary: {_chosen_vocabulary(choice)}",
    ]


def _vocabulary_row(choice: VocabularyChoice, candidate: VocabularyCandidate) -> str:
    measured = f"{choice.measured[candidate]:8.1f}" if candidate in choice.measured else " " * 8
    row = (
        f"{candidate.size:7d}  {candidate.tau:5.2f}  {choice.whole.tau - candidate.tau:8.2f}  "
        f"{1e3 * candidate.cycle_seconds:8.2f}  {choice.expected_speed(candidate):8.1f}  {measured}"
    )
    return f"{row}  {_origin(candidate)}".rstrip()


def _origin(candidate: VocabularyCandidate) -> str:
    if candidate.is_counted:
        return ""
    return "(all)" if candidate.token_ids is None else "(the drafter's)"


def _chosen_vocabulary(choice: VocabularyChoice) -> str:
    chosen, whole = choice.chosen, choice.whole
    if not choice.measured:
        return f"all {whole.size} tokens; fewer are not expected to be faster"
    if chosen is whole:
        return f"all {whole.size} tokens, measured to be fastest"
    gain = choice.measured[chosen] / choice.measured[whole] - 1
    time = chosen.cycle_seconds / whole.cycle_seconds - 1
    name = f"{chosen.size} of {whole.size} tokens {_origin(chosen)}".rstrip()
    return f"{name}: tau {chosen.tau / whole.tau - 1:+.1%}, time of a cycle {time:+.1%}, speed {gain:+.1%} measured"


def _temperature(given: DraftTemperature) -> str:
    return " ".join(f"{value:.2f}" for value in (given if isinstance(given, tuple) else (given,)))
