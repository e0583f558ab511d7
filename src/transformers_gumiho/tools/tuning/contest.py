"""Contests of trees by successive halving, and what they found."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...commands import UserValueError
from ...model.decoding_settings import NEVER_PAUSES
from ...model.modeling_gumiho import GumihoModel
from ...training.data.bars import progress_bar
from ..measuring.timing import PLAIN, DecodingMode, DecodingTime, Prompts, Runner
from .trees import Tree


# Numbers of turns after which trees are removed. Fewer trees decode more prompts in the same time.
ROUNDS = (3, 6, 12)
# Turns in which the winners are timed again.
FINAL_TURNS = 6


@dataclass(frozen=True)
class Standing:
    """
    How a tree compares with plain decoding: `tau` is its tokens per cycle, and `break_even` the time of a cycle in
    steps of plain decoding.
    """

    tau: float
    break_even: float

    @property
    def speedup(self) -> float:
        """Speed as a multiple of plain decoding's."""
        return self.tau / self.break_even


def compare(pairs: Sequence[tuple[DecodingTime, DecodingTime]]) -> Standing:
    """
    Summarizes turns, of a tree and of plain decoding each. A machine's speed drifts, so the ratio of the two times is
    taken within each turn. Other programs interrupt, so the median over the turns counts.
    """
    used = [(drafted, plain) for drafted, plain in pairs if drafted.num_passes and plain.num_passes]
    if not used:
        raise UserValueError("The texts end with their first token. Give other prompts, or more `max_new_tokens`.")
    tau = sum(drafted.num_tokens for drafted, _ in used) / sum(drafted.num_passes for drafted, _ in used)
    ratios = [drafted.pass_seconds / plain.pass_seconds for drafted, plain in used]
    return Standing(tau, statistics.median(ratios))


@dataclass(frozen=True)
class Contests:
    """Contests of the trees of a drafter."""

    runner: Runner
    drafter: GumihoModel

    def hold(
        self,
        name: str,
        trees: Sequence[Tree],
        prompts: Prompts,
        rows: int,
        temperature: float,
        is_final: bool = False,
    ) -> dict[Tree, Standing]:
        """
        Lets trees compete on prompts, of which each turn decodes the next `rows` as a batch. Returns all trees, the
        fastest first, then those that were removed last. The standings are those of the turns in which all trees took
        part, so that they compare the same prompts.
        """
        ranked = list(dict.fromkeys(trees))
        pairs: dict[Tree, list[tuple[DecodingTime, DecodingTime]]] = {tree: [] for tree in ranked}
        ends = (FINAL_TURNS,) if is_final else ROUNDS
        # After the first round, a single tree ends the contest. Two or more take all turns.
        rounds = list(pairwise([0, *(ends if len(ranked) > 1 else ends[:1])]))
        sizes = [min(max(-(-len(ranked) // 2**index), 2), len(ranked)) for index in range(len(rounds))]
        num_batches = sum((end - begin) * (1 + size) for (begin, end), size in zip(rounds, sizes, strict=True))
        with progress_bar(total=num_batches, desc=f"tuning: {name}", unit="batch") as bar:
            for (begin, end), size in zip(rounds, sizes, strict=True):
                competing = ranked[:size]
                modes = [PLAIN, *(self._mode(tree, is_final) for tree in competing)]
                for turn in range(begin, end):
                    # After the last prompt follows the first one.
                    batch = [prompts[(turn * rows + row) % len(prompts)] for row in range(rows)]
                    plain, *drafted = self.runner.compare(modes, batch, temperature, seed=turn)
                    for tree, taken in zip(competing, drafted, strict=True):
                        pairs[tree].append((taken, plain))
                    bar.update(1 + size)
                ranked[:size] = sorted(competing, key=lambda tree: compare(pairs[tree]).speedup, reverse=True)
        num_common = min(map(len, pairs.values()))
        return {tree: compare(pairs[tree][:num_common]) for tree in ranked}

    def _mode(self, tree: Tree, is_final: bool) -> DecodingMode:
        # With pauses, cycles without drafts would be timed.
        settings = tree.settings | {"break_even": NEVER_PAUSES}
        if is_final:
            # `break_even` is the time of a cycle in which the drafter alone drafts.
            settings["prompt_lookup_num_tokens"] = 0
        return DecodingMode(str(tree), {"assistant_model": self.drafter}, settings)


@dataclass(frozen=True)
class TuningResult:
    """
    Attributes:
        own: The drafter's own tree.
        trees: The trees that competed, the fastest first.
        vocabularies: The fastest tree with the draft vocabulary and with all tokens.
        chosen: The fastest tree for each number of rows. These trees differ only in size.
        finals: The chosen trees on prompts of no contest, by "greedy" or "sampled" and by rows.
    """

    own: Tree
    trees: Mapping[Tree, Standing]
    vocabularies: Mapping[Tree, Standing]
    chosen: Mapping[int, Tree]
    finals: Mapping[tuple[str, int], Standing]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that were found, as fields of a generation config."""
        winner = next(iter(self.chosen.values()))
        by_rows = {str(rows): tree.num_assistant_tokens for rows, tree in self.chosen.items()}
        break_even: dict[str, dict[str, float]] = {}
        for (kind, rows), standing in self.finals.items():
            break_even.setdefault(kind, {})[str(rows)] = round(standing.break_even, 3)
        return winner.settings | {"num_assistant_tokens": by_rows, "break_even": break_even}


def describe(result: TuningResult) -> str:
    """Returns the text that `gumiho tune` prints for a `result`."""
    contests = [_row(*found, "(the drafter's own)" * (found[0] == result.own)) for found in result.trees.items()]
    for tree, standing in result.vocabularies.items():
        remark = "(all tokens)" if tree.drafts_all_tokens else "(its draft vocabulary)"
        contests.append(_row(tree, standing, remark))
    lines = _table(("drafted", "branching", "depth", "temperature", *_NUMBERS, ""), contests)
    finals = [
        (rows, kind, result.chosen[rows].num_assistant_tokens, *_numbers(standing))
        for (kind, rows), standing in result.finals.items()
    ]
    lines += ["", "the fastest, on prompts that were not in the contests, without prompt lookup"]
    lines += _table(("rows", "decoding", "drafted", *_NUMBERS), finals)
    lines += ["", "tau: tokens per cycle; cycle: in steps of plain decoding; speed-up: tau / cycle"]
    lines += [
        f"PLAIN DECODING IS FASTER with {rows} row{'s' * (rows > 1)}, {kind}. Leave `assistant_model` out there."
        for (kind, rows), standing in result.finals.items()
        if round(standing.speedup, 2) < 1  # as it is shown
    ]
    return "\n".join(lines)


def _row(tree: Tree, standing: Standing, remark: str) -> tuple[object, ...]:
    shape = tree.num_assistant_tokens, tree.branching_factor, tree.tree_depth
    temperature = tree.draft_temperature
    shown = "by depth" if isinstance(temperature, tuple) else f"{temperature:.2f}"
    return (*shape, shown, *_numbers(standing), remark)


_NUMBERS = ("tau", "cycle", "speed-up")


def _numbers(standing: Standing) -> list[str]:
    return [f"{number:.2f}" for number in (standing.tau, standing.break_even, standing.speedup)]


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns the lines of a table whose columns end at the same place."""
    cells = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
