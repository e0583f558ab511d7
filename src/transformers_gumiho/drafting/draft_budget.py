"""How many tokens to draft, which is decided before anybody knows how good they are."""

from collections.abc import Sequence

import numpy as np

from ..model.cycle_costs import BatchCosts
from .tree_size import sizes_up_to


# The newest cycles, by which it is decided.
_NUM_CYCLES = 16
# What a cycle counts for, after each further one that drafted so many tokens, in how likely tokens usually are.
_FORGETTING = 0.5
# The share of a single row's speed that may be given up to see more drafted tokens than pay by what is known: those
# that were not seen are taken to be as likely as they usually are, and some of them are much likelier. The mean of
# many rows is seldom far from what it usually is, so a batch gives up less, in proportion.
_GIVEN_UP = 0.01
# Where the last of the tokens that were drafted was as likely as that, nobody knows what would have come behind it:
# so many times as many are drafted next.
_LIKELY = 0.7
_FURTHER = 2


class DraftBudget:
    """
    Decides how many tokens are drafted: the most with which the newest cycles would have been nearly as fast as with
    the best number, had each verified what was best of them. Twice as many where the last of those that were drafted
    was likely, and in the first cycle all that may be.

    Args:
        costs: Of cycles with as many rows as there are.
        sizes: To choose among.
        most: The most tokens that may be drafted.
    """

    def __init__(self, costs: BatchCosts, sizes: Sequence[int], most: int):
        self._choices = [size for size in sizes_up_to(most, sizes) if size]
        verified = [0, *self._choices]
        self._verified = np.array(verified)
        # `(drafted, verified)`: no more are verified than are drafted.
        self._cycle_ms = np.array([costs.cycle_ms(verified, drafted) for drafted in self._choices])
        self._cycle_ms[self._verified > np.array(self._choices)[:, None]] = np.inf
        self._usual = np.zeros(0)
        self._last = 0.0
        # For each number of drafted tokens, what each of the newest cycles would have got, and the milliseconds of it.
        self._newest = np.zeros((_NUM_CYCLES, 2, len(self._choices)))
        self._rows = np.arange(len(self._choices))
        self._num_cycles = 0

    def choose(self, num_rows: int) -> int:
        """Returns how many tokens to draft, in a batch of which so many rows have not ended."""
        if not self._num_cycles:
            return self._choices[-1]
        tokens, ms = self._newest.sum(axis=0)
        speeds = tokens / ms
        most = self._choices[int(np.flatnonzero(speeds >= (1 - _GIVEN_UP / num_rows) * speeds.max())[-1])]
        return most if self._last < _LIKELY else min(_FURTHER * most, self._choices[-1])

    def observe(self, probabilities: np.ndarray) -> None:
        """
        Takes in the tree of a cycle.

        Args:
            probabilities (`(N,)`): How likely each of its drafted tokens is to be accepted in a row, in their order.
        """
        self._last = probabilities[-1]
        num_drafted, usual = len(probabilities), self._usual
        known = min(num_drafted, len(usual))
        newest = usual[:known] + (1 - _FORGETTING) * (probabilities[:known] - usual[:known])
        # What was not drafted is taken to change as the last of those does that were.
        further = _scaled(usual[known:], usual[known - 1 : known], probabilities[-1:])
        self._usual = np.concatenate(
            (newest, probabilities[known:], _scaled(usual[known:], usual[known - 1 : known], newest[-1:]))
        )
        totals = np.concatenate(([1.0], probabilities, further)).cumsum()
        tokens = totals[np.minimum(self._verified, len(totals) - 1)]
        best = (tokens / self._cycle_ms).argmax(axis=1)
        place = self._newest[self._num_cycles % _NUM_CYCLES]
        place[0], place[1] = tokens[best], self._cycle_ms[self._rows, best]
        self._num_cycles += 1


def _scaled(further: np.ndarray, before: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Returns what follows in proportion to the last one `(1,)` above it, before and now, and is never above that."""
    return np.minimum(further * now / np.maximum(before, 1e-9), now) if len(further) else further
