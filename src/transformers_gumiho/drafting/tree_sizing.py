"""Fitting the trees of a generation to what they cost and to how they do: their sizes, and whether to draft at all."""

from collections.abc import Sequence

import numpy as np

from ..model.cycle_costs import AcceptanceCurve, BatchCosts
from ..tree.draft_tree import DraftTree
from .tree_size import TREE_SIZES, DraftingPause, SizeChoice, choose_size, path_probabilities, sizes_up_to


# What a cycle counts for after each further one that drafted: drafts get better and worse within a text.
_FORGETTING_ACCEPTANCE = 0.95
_FORGETTING_SPEED = 0.85
# What is left of the cycles before a pause when drafting is tried again: that trial should tell more than they do.
_LEFT_BY_PAUSE = 0.25
# For how many expected tokens it stands that the expectation is right, before anything was observed.
_PRIOR_TOKENS = 2.0
# What is expected of the first cycle counts as at most so many times the speed of plain decoding: a drafter that does
# not fit may be sure of itself.
_MOST_EXPECTED_SPEEDUP = 2.0
# Drafted tokens that are verified at most when drafting is tried again: enough to tell whether it pays.
TRIAL_SIZE = 4
# Cycles without drafts before drafting is tried again: at first, and at most.
FIRST_PAUSE = 4
LONGEST_PAUSE = 64


class AcceptanceCorrection:
    """How many tokens were accepted for each that was expected, in a generation so far."""

    def __init__(self) -> None:
        self._accepted = self._expected = 0.0

    @property
    def factor(self) -> float:
        """What expectations are to be multiplied by."""
        return (self._accepted + _PRIOR_TOKENS) / (self._expected + _PRIOR_TOKENS)

    def observe(self, expected: float, accepted: float) -> None:
        """Counts a cycle with the tokens that were expected, without this correction, and accepted in a row."""
        self._accepted = _FORGETTING_ACCEPTANCE * self._accepted + accepted
        self._expected = _FORGETTING_ACCEPTANCE * self._expected + expected


class BackOff:
    """
    Decides whether to draft. Where the newest cycles that drafted were slower than plain decoding, it pauses, each
    time for twice as long as before, up to a limit; once they are faster again the pauses begin anew.

    Args:
        plain_ms: Milliseconds of a step of plain decoding.
    """

    def __init__(self, plain_ms: float):
        self._plain_ms = plain_ms
        self._tokens = self._ms = 0.0
        self._next_pause = FIRST_PAUSE
        self.num_left = 0

    @property
    def drafted_speed(self) -> float:
        """Tokens per second in a row of the newest cycles that drafted."""
        return 1e3 * self._tokens / self._ms

    @property
    def plain_speed(self) -> float:
        """Tokens per second of plain decoding in a row."""
        return 1e3 / self._plain_ms

    def expect(self, tokens: float, cycle_ms: float) -> None:
        """Takes in what the first cycle is expected to do, as if there had been one like that before it."""
        if not self._ms:
            self._ms = cycle_ms
            self._tokens = min(tokens, _MOST_EXPECTED_SPEEDUP * cycle_ms / self._plain_ms)

    def observe(self, tokens: float, cycle_ms: float) -> None:
        """Takes in a cycle that drafted, with the tokens that each row got of it and the time that it should take."""
        self._tokens = _FORGETTING_SPEED * self._tokens + tokens
        self._ms = _FORGETTING_SPEED * self._ms + cycle_ms
        if self.drafted_speed >= self.plain_speed:
            self._next_pause = FIRST_PAUSE
        else:
            self.num_left, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
            self._tokens, self._ms = _LEFT_BY_PAUSE * self._tokens, _LEFT_BY_PAUSE * self._ms

    def pauses(self) -> bool:
        """Whether the next cycle does not draft; counts it."""
        if self.num_left == 0:
            return False
        self.num_left -= 1
        return True


class TreeSizing:
    """
    Fits the trees of a generation: before each cycle [`pauses`] says whether to draft, then [`cut`] which part of the
    tree to verify, and after it [`observe`] is told what came of it.

    Args:
        costs: Of cycles with as many rows as there are.
        curve: How often drafted tokens are accepted, by their scores; `None` takes the drafter at its word.
        rows_together: The trees are chains, and a token is accepted only where it is in all rows.
        sizes: To choose among.
    """

    def __init__(
        self,
        costs: BatchCosts,
        curve: AcceptanceCurve | None = None,
        rows_together: bool = False,
        sizes: Sequence[int] = TREE_SIZES,
    ):
        self._costs = costs
        self._curve = curve
        self._rows_together = rows_together
        self._sizes = sizes
        self._correction = AcceptanceCorrection()
        self._back_off = BackOff(costs.plain_ms)
        self._tries_again = False
        self.reason: SizeChoice | DraftingPause | None = None

    def pauses(self) -> bool:
        """Whether the next cycle is one without a draft. To be called once for each cycle."""
        if not self._back_off.pauses():
            return False
        back_off = self._back_off
        # The text is another one when drafting is tried again, and may be one that the drafter knows better.
        self._correction, self._tries_again = AcceptanceCorrection(), True
        self.reason = DraftingPause(back_off.drafted_speed, back_off.plain_speed, back_off.num_left)
        return True

    def cut(self, tree: DraftTree, is_open: Sequence[bool]) -> DraftTree:
        """Returns the part of `tree` that is worth most for its cost, where only the rows that are open gain by it."""
        scores = tree.scores[:, 1:].numpy(force=True).astype(np.float64)[list(is_open)]
        probabilities = path_probabilities(scores, self._curve, self._rows_together)
        sizes = sizes_up_to(scores.shape[1], self._sizes)
        if self._tries_again:
            sizes = tuple(size for size in sizes if size <= TRIAL_SIZE)
        choice = choose_size(probabilities, sizes, self._costs, self._correction.factor)
        self._back_off.expect(1 + choice.expected[choice.place], choice.cycle_ms[choice.place])
        self.reason = choice
        return tree.first(choice.size)

    def observe(self, accepted_lengths: Sequence[int]) -> None:
        """Takes in how many tokens each row got of a cycle; 0 where it had ended before."""
        choice = self.reason
        lengths = [length for length in accepted_lengths if length]
        if not isinstance(choice, SizeChoice) or not lengths:
            return
        tokens = sum(lengths) / len(lengths)
        self._tries_again = False
        self._correction.observe(choice.expected[choice.place] / choice.correction, tokens - 1)
        self._back_off.observe(tokens, choice.cycle_ms[choice.place])
