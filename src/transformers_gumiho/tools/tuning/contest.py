"""Successive halving: trees and plain decoding take turns, and each round removes the slower half of the trees."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from ...commands import UserValueError
from ..measuring.timing import DecodingTime
from .trees import Tree


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


def compare(pairs: Sequence[tuple[DecodingTime, DecodingTime]]) -> Standing:
    """
    Summarizes turns, of a tree and of plain decoding each. Acceptance does not depend on time, so tau is a sum over
    all turns. A machine's speed drifts, so the ratio of the two times is taken within each turn. Other programs
    interrupt, so the median over the turns counts.

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


def find_fastest(
    trees: Sequence[Tree], decode: Callable[[Sequence[Tree], int], list[DecodingTime]], ends: Sequence[int], name: str
) -> dict[Tree, Standing]:
    """
    Lets trees compete.

    Args:
        trees: The trees.
        decode: Decodes the prompts of a turn plainly and with each tree; returns the times in this order.
        ends: For each round, the number of turns until it ends. Each begins with half as many trees as the one before.
        name: What the progress bar calls the contest.

    Returns:
        All trees, the fastest first. Removed trees follow, those that were removed last before the others.

    Raises:
        ValueError: All texts end with their first token.
    """
    ranked = list(dict.fromkeys(trees))
    pairs: dict[Tree, list[tuple[DecodingTime, DecodingTime]]] = {tree: [] for tree in ranked}
    sizes = [-(-len(ranked) // 2**index) for index in range(len(ends))]
    rounds = list(zip([0, *ends], ends, sizes, strict=False))
    # After the first round, a single tree ends the contest.
    rounds = [(begin, end, size) for begin, end, size in rounds if size > 1 or begin == 0]
    num_batches = sum((end - begin) * (1 + size) for begin, end, size in rounds)
    with tqdm(total=num_batches, desc=f"tuning: {name}", unit="batch") as bar:
        for begin, end, size in rounds:
            competing, left = ranked[:size], ranked[size:]
            for turn in range(begin, end):
                plain, *drafted = decode(competing, turn)
                bar.update(1 + size)
                for tree, taken in zip(competing, drafted, strict=True):
                    pairs[tree].append((taken, plain))
            speeds = {tree: compare(pairs[tree]).speedup for tree in competing}
            ranked = sorted(competing, key=speeds.__getitem__, reverse=True) + left
    return {tree: compare(pairs[tree]) for tree in ranked}
