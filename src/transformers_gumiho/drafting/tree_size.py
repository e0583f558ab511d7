"""How many drafted tokens a cycle verifies: as many as make the most of its time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..model.cycle_costs import BatchCosts


# Among few sizes little is lost: beside the best one expectation and cost change slowly.
TREE_SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 63, 80, 96, 128, 160, 192, 256)
# Where each size takes compiled functions of its own.
COMPILED_TREE_SIZES = (0, 3, 7, 12, 20, 32, 48, 63, 96, 128, 256)
# Tokens by which a row is ahead of the slowest one of its batch when its next token counts half.
_HALVING_LEAD = 4.0
# A longer lead counts as this one: a row that is open counts something.
_LONGEST_LEAD = 64


@dataclass(frozen=True)
class SizeChoice:
    """
    Why a cycle verifies as many drafted tokens as it does.

    Attributes:
        size: Drafted tokens that are verified.
        sizes: Those that could have been, increasing.
        expected: For each of these sizes, the drafted tokens that are expected to be accepted in a row: the mean of
            the rows, as much as each weighs.
        cycle_ms: For each of them, the milliseconds that a cycle should take.
        plain_ms: Those of a step of plain decoding.
        correction: What expectations were multiplied by, as accepted tokens were told from expected ones before.
    """

    size: int
    sizes: tuple[int, ...]
    expected: tuple[float, ...]
    cycle_ms: tuple[float, ...]
    plain_ms: float
    correction: float

    @property
    def place(self) -> int:
        """The place of the chosen size among the sizes."""
        return self.sizes.index(self.size)

    @property
    def tokens_per_second(self) -> tuple[float, ...]:
        """The tokens per second to expect of each size, in a row."""
        return tuple(1e3 * (1 + e) / ms for e, ms in zip(self.expected, self.cycle_ms, strict=True))


@dataclass(frozen=True)
class DraftingPause:
    """
    Why the drafter rests in a cycle: its drafts were not worth their time.

    Attributes:
        drafted_speed: Tokens per second in a row of the newest cycles that drafted, in a batch mostly in the rows that
            are behind.
        undrafted_speed: Those of plain decoding or, if that is more, what drafts from the context alone would have
            made of the same cycles.
        num_left: Further cycles without the drafter until it is tried again.
        size: Tokens that are verified nevertheless, as the context drafts them.
    """

    drafted_speed: float
    undrafted_speed: float
    num_left: int
    size: int = 0


@dataclass(frozen=True)
class ContextRun:
    """
    Why a cycle verifies what the context drafts, alone, and more of it than otherwise: all that it drafted before was
    right.

    Attributes:
        size: Tokens that are verified.
        expected: Those of them that are expected to be accepted, fewer where earlier runs had fewer than expected.
        cycle_ms: Milliseconds that the cycle should take.
    """

    size: int
    expected: float
    cycle_ms: float


SizeReason = SizeChoice | DraftingPause | ContextRun


def sizes_up_to(num_drafted: int, sizes: Sequence[int] = TREE_SIZES) -> tuple[int, ...]:
    """Returns the sizes to choose among, for a tree of `num_drafted` tokens: those that are smaller, and all of it."""
    return (*(size for size in sizes if size < num_drafted), num_drafted)


def row_weights(lengths: Sequence[int | None]) -> list[float]:
    """
    Returns what a further token counts in each row of a batch, which takes as long as its slowest row.

    Args:
        lengths: The tokens that each row has so far; `None` where it has ended, and nothing counts.
    """
    slowest = min((length for length in lengths if length is not None), default=0)
    leads = (None if length is None else min(length - slowest, _LONGEST_LEAD) for length in lengths)
    return [0.0 if lead is None else 0.5 ** (lead / _HALVING_LEAD) for lead in leads]


def path_probabilities(scores: np.ndarray, rows_together: bool = False) -> np.ndarray:
    """
    Returns `(B, N)`: how likely each drafted token is to be accepted.

    Args:
        scores (`(B, N)`): How likely the paths are that end at the tokens (nats).
        rows_together: The rows are chains of which a token is accepted only where it is in all of them.
    """
    probabilities = np.exp(scores)
    return np.broadcast_to(probabilities.prod(axis=0), scores.shape) if rows_together else probabilities


def choose_size(
    probabilities: np.ndarray,
    sizes: Sequence[int],
    costs: BatchCosts,
    correction: float = 1.0,
    drafter_rests: bool = False,
    weights: np.ndarray | None = None,
    num_drafted: int | None = None,
) -> SizeChoice:
    """
    Chooses the size that maximises (1 + expected accepted tokens) / time; of equal ones the smallest.

    Args:
        probabilities (`(B, N)`): How likely each drafted token is to be accepted, in the order of the tree.
        sizes: To choose among, increasing; none above `N`.
        costs: Of cycles with so many rows.
        correction: What expectations are to be multiplied by.
        drafter_rests: All tokens are from the context.
        weights (`(B,)`): What the tokens of each row count; by default all of them the same.
        num_drafted: The tokens that the drafter has drafted; by default as many as are verified.
    """
    totals = np.zeros(probabilities.shape[1] + 1)
    weighed = probabilities.mean(axis=0) if weights is None else weights @ probabilities / weights.sum()
    weighed.cumsum(out=totals[1:])
    expected = correction * totals[list(sizes)]
    # All rows of a batch have the same time.
    cycle_ms, as_array = _cycle_ms(costs, tuple(sizes), drafter_rests, num_drafted)
    best = int(((1 + expected) / as_array).argmax())
    return SizeChoice(sizes[best], tuple(sizes), tuple(expected.tolist()), cycle_ms, costs.plain_ms, correction)


@lru_cache(maxsize=256)
def _cycle_ms(
    costs: BatchCosts, sizes: tuple[int, ...], drafter_rests: bool, num_drafted: int | None
) -> tuple[tuple[float, ...], np.ndarray]:
    """Returns the milliseconds of cycles of these sizes, twice: kept, as they are the same in most cycles."""
    cycle_ms = costs.undrafted_ms(sizes) if drafter_rests else costs.cycle_ms(sizes, num_drafted)
    cycle_ms.setflags(write=False)
    return tuple(cycle_ms.tolist()), cycle_ms
