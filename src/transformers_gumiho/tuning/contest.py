"""Successive halving: trees and plain decoding take turns, and each round removes the slower half of the trees."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..measuring.timing import DecodingTime
from ..user_errors import UserValueError
from .trees import Tree


# Numbers of turns after which trees are removed. Fewer trees decode more prompts in the same time.
ROUNDS = (3, 6, 12)


@dataclass(frozen=True)
class Contest:
    """
    Prompts that are decoded in turns.

    Attributes:
        prompts: Token ids of each prompt.
        rows: Number of prompts in a turn, which are decoded as a batch.
        temperature: 0 is greedy.
        counted: Token ids that trees with the vocabulary "counted" may draft.
        drafter_alone: Leave out prompt lookup, even if the drafter's settings ask for it.
    """

    prompts: Sequence[Sequence[int]]
    rows: int
    temperature: float
    counted: Sequence[int] = ()
    drafter_alone: bool = False

    def indices(self, turn: int) -> list[int]:
        """Returns the indices of the prompts of a turn. After the last prompt follows the first one."""
        return [(turn * self.rows + row) % len(self.prompts) for row in range(self.rows)]


# Decodes the prompts of a turn plainly and with each tree; returns the times in this order.
Decode = Callable[[Contest, Sequence[Tree], int], list[DecodingTime]]
# Times of a tree and of plain decoding for the same prompts, in the same turn.
Pair = tuple[DecodingTime, DecodingTime]


@dataclass(frozen=True)
class Standing:
    """
    How a tree compares with plain decoding.

    Attributes:
        tau: Tokens per cycle.
        break_even: Time of a cycle in steps of plain decoding: with this tau, both are equally fast.
        num_turns: Turns in which both were measured.
    """

    tau: float
    break_even: float
    num_turns: int

    @property
    def speedup(self) -> float:
        """Speed as a multiple of plain decoding's."""
        return self.tau / self.break_even


def compare(pairs: Sequence[Pair]) -> Standing:
    """
    Summarizes turns. Acceptance does not depend on time, so tau is a sum over all turns. A machine's speed drifts, so
    the ratio of the two times is taken within each turn. Other programs interrupt, so the median over the turns
    counts.

    Raises:
        ValueError: All texts end with their first token.
    """
    # A cycle that drafts nothing is a step of plain decoding.
    used = [
        (drafted.of_drafted_cycles(), plain) for drafted, plain in pairs if drafted.num_passes and plain.num_passes
    ]
    if not used:
        raise UserValueError("The texts end with their first token. Give other prompts, or more `max_new_tokens`.")
    tau = sum(drafted.num_tokens for drafted, _ in used) / sum(drafted.num_passes for drafted, _ in used)
    ratios = [drafted.pass_seconds / plain.pass_seconds for drafted, plain in used]
    return Standing(tau, statistics.median(ratios), len(used))


def find_fastest(trees: Sequence[Tree], contest: Contest, decode: Decode) -> dict[Tree, Standing]:
    """
    Lets trees compete, at least one, on the prompts of a contest.

    Returns:
        All trees, the fastest first. Removed trees follow, those that were removed last before the others.

    Raises:
        ValueError: All texts end with their first token.
    """
    ranked = list(dict.fromkeys(trees))
    pairs: dict[Tree, list[Pair]] = {tree: [] for tree in ranked}
    for turns, num_trees in _rounds(len(ranked)):
        competing, left = ranked[:num_trees], ranked[num_trees:]
        for turn in turns:
            plain, *drafted = decode(contest, competing, turn)
            for tree, taken in zip(competing, drafted, strict=True):
                pairs[tree].append((taken, plain))
        speeds = {tree: compare(pairs[tree]).speedup for tree in competing}
        ranked = sorted(competing, key=speeds.__getitem__, reverse=True) + left
    return {tree: compare(pairs[tree]) for tree in ranked}


def num_measured(num_trees: int) -> int:
    """Returns the number of measurements of [`find_fastest`] for this many trees, plain decoding included."""
    return sum(len(turns) * (num_left + 1) for turns, num_left in _rounds(num_trees))


def _rounds(num_trees: int) -> Iterator[tuple[range, int]]:
    """Yields the turns of each round and the number of trees in it. After the first round, a single tree ends it."""
    begin = 0
    for end in ROUNDS:
        if begin and num_trees == 1:
            return
        yield range(begin, end), num_trees
        begin, num_trees = end, math.ceil(num_trees / 2)
