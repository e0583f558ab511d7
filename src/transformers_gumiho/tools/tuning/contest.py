"""Successive halving: each round removes the slower half of the trees."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    Summarizes turns, of a tree and of plain decoding each. Acceptance does not depend on time, so tau is a sum over
    all turns. A machine's speed drifts, so the ratio of the two times is taken within each turn. Other programs
    interrupt, so the median over the turns counts. Raises `ValueError` if all texts end with their first token.
    """
    used = [(drafted, plain) for drafted, plain in pairs if drafted.num_passes and plain.num_passes]
    if not used:
        raise UserValueError("The texts end with their first token. Give other prompts, or more `max_new_tokens`.")
    tau = sum(drafted.num_tokens for drafted, _ in used) / sum(drafted.num_passes for drafted, _ in used)
    ratios = [(drafted.seconds / drafted.num_passes) / (plain.seconds / plain.num_passes) for drafted, plain in used]
    return Standing(tau, statistics.median(ratios))


class Contests:
    """Contests of the trees of a drafter."""

    def __init__(self, runner: Runner, drafter: GumihoModel):
        self._runner, self._drafter = runner, drafter

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
                    plain, *drafted = self._runner.compare(modes, batch, temperature, seed=turn)
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
        return DecodingMode(str(tree), {"assistant_model": self._drafter}, settings)
