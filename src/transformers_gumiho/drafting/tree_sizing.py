"""Fitting the trees of a generation to what they cost and to how they do: their sizes, and whether to draft at all."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from operator import mul

import numpy as np
import torch

from ..model.acceptance_curves import AcceptanceCurves
from ..model.cycle_costs import BatchCosts
from ..tree.draft_tree import DraftTree, rescore
from .context_branch import ContextBranch
from .draft_budget import DraftBudget
from .tree_size import (
    TREE_SIZES,
    ContextRun,
    DraftingPause,
    SizeChoice,
    SizeReason,
    choose_size,
    path_probabilities,
    sizes_up_to,
)


# What a cycle counts for after each further one that drafted: drafts get better and worse within a text, and few
# cycles tell little.
_FORGETTING_ACCEPTANCE = 0.95
_FORGETTING_SPEED = 0.93
# What runs count for after each further one that was not taken because of them.
_FORGETTING_REFUSED = 0.8
# What is left of the cycles before a pause when drafting is tried again: that trial should tell more than they do.
_LEFT_BY_PAUSE = 0.25
# For how many expected tokens it stands that the expectation is right, before anything was observed.
_PRIOR_TOKENS = 2.0
# What is expected of the first cycle counts as at most so many times the speed of plain decoding: a drafter that does
# not fit may be sure of itself.
_MOST_EXPECTED_SPEEDUP = 2.0
# How much of the speed of another way is enough to go on: few cycles tell little, and nor does a table where two sizes
# cost nearly the same. So the drafter goes on beside drafts from the context alone that are not clearly faster, and a
# cycle at rest is one of plain decoding unless what the context drafts makes it clearly faster.
_CLEARLY = 0.9
# The power of the rows' weights where it is asked whether to draft, or to verify what the context drafts: without
# either every row gets a token, and what rows get besides seldom ends a batch sooner unless they are the slowest.
_SHARPER_WHETHER = 4
# Drafted tokens that are verified at most when drafting is tried again, beside as many as the context would have
# drafted alone: enough to tell whether it pays.
TRIAL_SIZE = 4
# Tokens of a row that cycles which draft may lose before they pause, and that earlier gains make up for at most: a
# drafter that has gained may lose more, as one that does not fit gains nothing.
_MOST_LOST, _MOST_GAINED = 2.0, 4.0
# Cycles without the drafter before it is tried again: the first time, and later, until what was lost is regained.
FIRST_PAUSE, LATER_PAUSE = 8, 64


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

    def forget(self) -> None:
        """Makes what was observed count less: what it is about was left undone once more because of it."""
        self._accepted *= _FORGETTING_REFUSED
        self._expected *= _FORGETTING_REFUSED


class BackOff:
    """
    Decides whether to draft. It pauses where the newest cycles that drafted were slower than plain decoding, or
    clearly slower than the same would have been with drafts from the context alone, and more was lost than by a bad
    cycle or two: lost tokens are summed up, gained ones taken off as far as they are few (a one-sided cumulative sum
    test, E. S. Page, 1954). Later pauses are longer than the first one; once nothing is lost any more the pauses begin
    anew.

    Args:
        plain_ms: Milliseconds of a step of plain decoding.
    """

    def __init__(self, plain_ms: float):
        self._plain_ms = plain_ms
        self._tokens = self._ms = 0.0
        self._undrafted_tokens, self._undrafted_ms = 1.0, plain_ms
        self._lost = 0.0  # tokens of a row
        self._next_pause = FIRST_PAUSE
        self.num_left = 0

    @property
    def drafted_speed(self) -> float:
        """Tokens per second in a row of the newest cycles that drafted, by the mean that [`observe`] was told."""
        return 1e3 * self._tokens / self._ms

    @property
    def context_speed(self) -> float:
        """Tokens per second in a row that drafts from the context alone would have made of the same cycles."""
        return 1e3 * self._undrafted_tokens / self._undrafted_ms

    @property
    def undrafted_speed(self) -> float:
        """Tokens per second in a row without the drafter, by plain decoding or with drafts from the context."""
        return max(1e3 / self._plain_ms, self.context_speed)

    def expect(self, tokens: float, cycle_ms: float) -> None:
        """Takes in what the first cycle is expected to do, as if there had been one like that before it."""
        if not self._ms:
            self._ms = cycle_ms
            self._tokens = min(tokens, _MOST_EXPECTED_SPEEDUP * cycle_ms / self._plain_ms)

    def observe(
        self, tokens: float, cycle_ms: float, undrafted_tokens: float = 1.0, undrafted_ms: float | None = None
    ) -> None:
        """
        Takes in a cycle that drafted.

        Args:
            tokens: That each row got of it, on average, rows that are behind counting most.
            cycle_ms: Milliseconds that it should take.
            undrafted_tokens: That each row would have got of it without the drafter, at least: one by plain decoding,
                and of drafts from the context as many more as are known to have been right.
            undrafted_ms: Milliseconds that it should have taken then; by default those of plain decoding.
        """
        kept = _FORGETTING_SPEED
        self._tokens, self._ms = kept * self._tokens + tokens, kept * self._ms + cycle_ms
        self._undrafted_tokens = kept * self._undrafted_tokens + undrafted_tokens
        self._undrafted_ms = kept * self._undrafted_ms + (self._plain_ms if undrafted_ms is None else undrafted_ms)
        least_speed = max(1e3 / self._plain_ms, _CLEARLY * self.context_speed)
        self._lost = max(self._lost + least_speed * cycle_ms / 1e3 - tokens, -_MOST_GAINED)
        if self._lost <= 0:
            self._next_pause = FIRST_PAUSE
        elif self._lost > _MOST_LOST and self.drafted_speed < least_speed:
            self._begin_pause()

    def _begin_pause(self) -> None:
        self.num_left, self._next_pause = self._next_pause, LATER_PAUSE
        # One more cycle that loses is enough then.
        self._lost = _MOST_LOST
        self._tokens, self._ms = _LEFT_BY_PAUSE * self._tokens, _LEFT_BY_PAUSE * self._ms
        self._undrafted_tokens *= _LEFT_BY_PAUSE
        self._undrafted_ms *= _LEFT_BY_PAUSE

    def pauses(self) -> bool:
        """Whether the drafter rests in the next cycle; counts it."""
        if self.num_left == 0:
            return False
        self.num_left -= 1
        return True


class TreeSizing:
    """
    Fits the trees of a generation. Before each cycle [`pauses`] says whether the drafter rests. If the context offers
    a run, [`takes_run`] says whether to verify that. Else, where the drafter rests, [`size_at_rest`] says how many
    tokens of the context's branch to verify. Where it does not rest, [`num_to_draft`] may say how much it drafts, its
    tree goes through [`weigh`], is joined with the branch, and [`cut`] says which part to verify. After the cycle
    [`observe`] is told what came of it.

    The rows of a batch have weights, one for each row: what a further token of it counts, and 0 where it has ended. At
    least one row has not.

    Args:
        costs: Of cycles with as many rows as there are.
        curves: How often drafted tokens are accepted, by score and depth; `None` takes the drafter at its word.
        rows_together: The trees are chains, and a token is accepted only where it is in all rows.
        in_lockstep: All rows get as many tokens of a cycle as the one that gets least.
        sizes: To choose among.
    """

    def __init__(
        self,
        costs: BatchCosts,
        curves: AcceptanceCurves | None = None,
        rows_together: bool = False,
        in_lockstep: bool = False,
        sizes: Sequence[int] = TREE_SIZES,
    ):
        self._costs = costs
        self._curves = curves
        self._rows_together = rows_together
        self._in_lockstep = in_lockstep or rows_together
        self._sizes = sizes
        self._correction = AcceptanceCorrection()
        self._run_correction = AcceptanceCorrection()
        self._expected_of_run = 0.0  # without that correction
        self._back_off = BackOff(costs.plain_ms)
        self._tries_again = False
        self._weights = np.zeros(0)  # of the rows, as they were when the newest tree was cut
        self._budget: DraftBudget | None = None  # where the drafter is told how much to draft
        # Scores of the newest tree's tokens, without those of the context.
        self._drafted: torch.Tensor | None = None
        self._at_rest: SizeChoice | None = None  # what would have been verified had the drafter rested
        self._has_branch = np.zeros(0, dtype=bool)  # the rows that have a branch of the context
        self.reason: SizeReason | None = None

    @property
    def is_pausing(self) -> bool:
        """Whether the drafter rests in the cycle after the next call of [`pauses`], too."""
        return self._back_off.num_left > 0

    def pauses(self) -> bool:
        """Whether the drafter rests in the next cycle. To be called once for each cycle."""
        if not self._back_off.pauses():
            return False
        # The text is another one when drafting is tried again, and may be one that the drafter knows better.
        self._correction, self._tries_again = AcceptanceCorrection(), True
        return True

    def takes_run(self, branch: ContextBranch) -> bool:
        """
        Whether the next cycle verifies all of a branch of one row, a run, and nothing else: where that should be no
        slower than plain decoding, and than the newest cycles that drafted.
        """
        size, back_off = branch.scores.shape[1], self._back_off
        self._expected_of_run = float(path_probabilities(branch.scores).sum())
        expected = min(self._run_correction.factor, 1.0) * self._expected_of_run
        run = ContextRun(size, expected, float(self._costs.undrafted_ms(size)))
        if 1e3 * (1 + expected) / run.cycle_ms < max(back_off.drafted_speed, 1e3 / self._costs.plain_ms):
            self._run_correction.forget()
            return False
        self.reason = run
        return True

    def size_at_rest(self, weights: Sequence[float], branch: ContextBranch | None) -> int:
        """Returns how many tokens of the context's branch a cycle verifies in which the drafter rests."""
        choice, back_off = self._choose_at_rest(np.array(weights), branch), self._back_off
        size = 0 if choice is None else choice.size
        self.reason = DraftingPause(back_off.drafted_speed, back_off.undrafted_speed, back_off.num_left, size)
        return size

    def num_to_draft(self, most: int, weights: Sequence[float], branch: ContextBranch | None = None) -> int:
        """
        Returns how many nodes, of `most`, the drafter is to draft: as many as its budget says, and room for what is
        worth being verified of the context's branch. The other arguments are those of [`cut`].
        """
        at_rest = self._choose_at_rest(np.array(weights), branch)
        of_branch = 0 if at_rest is None else at_rest.size
        if self._budget is None:
            self._budget = DraftBudget(self._costs, self._sizes, most)
        num_open = sum(weight > 0 for weight in weights)
        enough = of_branch + (TRIAL_SIZE if self._tries_again else self._budget.choose(num_open))
        return next(size for size in sizes_up_to(most, self._sizes) if size >= min(enough, most))

    def weigh(self, tree: DraftTree) -> DraftTree:
        """Returns a drafter's tree with scores that are as likely as the curves say, its nodes in their order."""
        if self._curves is not None:
            drafted = self._curves.log_probabilities(tree.scores[:, 1:], tree.depths[:, 1:])
            tree = rescore(tree, torch.cat((tree.scores[:, :1], drafted), dim=1))
        self._drafted = tree.scores[:, 1:]
        return tree

    def cut(self, tree: DraftTree, weights: Sequence[float], branch: ContextBranch | None = None) -> DraftTree:
        """
        Returns the part of a tree that is worth most for its cost.

        Args:
            tree: With the scores that [`weigh`] returns.
            weights: What a token counts in each row: nothing where the row has ended.
            branch: What the context drafted, which the tree holds as well where it is likely.
        """
        self._weights = np.array(weights)
        is_open = self._weights > 0
        scores = tree.scores[:, 1:].numpy(force=True).astype(np.float64)[is_open]
        sizes = sizes_up_to(scores.shape[1], self._sizes)
        self._at_rest = self._choose_at_rest(self._weights, branch)
        if branch is not None:
            self._has_branch = branch.scores[:, 0] > -np.inf
        if self._tries_again:
            # Enough for what the context drafts, too.
            most = TRIAL_SIZE + (self._at_rest.size if self._at_rest is not None else 0)
            sizes = tuple(size for size in sizes if size <= most)
        probabilities, open_weights = path_probabilities(scores, self._rows_together), self._weights[is_open]
        choice = choose_size(
            probabilities, sizes, self._costs, self._correction.factor, weights=open_weights,
            num_drafted=None if self._drafted is None else self._drafted.shape[1],
        )  # fmt: skip
        if self._budget is not None and self._drafted is not None:
            own = probabilities
            if branch is not None:
                drafted = self._drafted.numpy(force=True).astype(np.float64)[is_open]
                own = path_probabilities(drafted, self._rows_together)
            # Nearly the first of them would have been drafted alone: which, the drafter's own scores say.
            self._budget.observe(self._correction.factor * (open_weights @ own) / open_weights.sum())
        self._back_off.expect(1 + choice.expected[choice.place], choice.cycle_ms[choice.place])
        self.reason = choice
        return tree.first(choice.size)

    def observe(self, accepted_lengths: Sequence[int], num_right: Sequence[int] = ()) -> None:
        """
        Takes in what came of a cycle.

        Args:
            accepted_lengths: The tokens that each row got; 0 where it had ended before.
            num_right: How many tokens of the context's branch were right in each row; nothing without one.
        """
        choice, at_rest = self.reason, self._at_rest
        if isinstance(choice, ContextRun):
            self._run_correction.observe(self._expected_of_run, accepted_lengths[0] - 1.0)
        is_open = [length > 0 for length in accepted_lengths]
        if not isinstance(choice, SizeChoice) or not any(is_open):
            return
        self._tries_again = False
        got, weights = list(compress(accepted_lengths, is_open)), list(compress(self._weights.tolist(), is_open))
        self._correction.observe(choice.expected[choice.place] / choice.correction, _mean(got, weights) - 1)
        sharper = [weight**_SHARPER_WHETHER for weight in weights]
        tokens, cycle_ms = _mean(got, sharper), choice.cycle_ms[choice.place]
        if at_rest is None:
            self._back_off.observe(tokens, cycle_ms)
            return
        right = np.minimum(np.array(num_right) * self._has_branch, at_rest.size)[is_open].tolist()
        undrafted_tokens = 1 + (min(right) if self._in_lockstep else _mean(right, sharper))
        self._back_off.observe(tokens, cycle_ms, undrafted_tokens, at_rest.cycle_ms[at_rest.place])

    def _choose_at_rest(self, weights: np.ndarray, branch: ContextBranch | None) -> SizeChoice | None:
        if branch is None:
            return None
        is_open = weights > 0
        # A column of the branch is a depth: what all rows get is what all of them have right up to there.
        probabilities = path_probabilities(branch.scores[is_open], self._in_lockstep)
        # Not as many as the branch has, if that is none of them: in fixed shapes it would take functions of its own.
        sizes = [size for size in self._sizes if size <= probabilities.shape[1]]
        counting = weights[is_open] ** _SHARPER_WHETHER
        choice = choose_size(probabilities, sizes, self._costs, drafter_rests=True, weights=counting)
        speeds = choice.tokens_per_second
        return replace(choice, size=0) if speeds[0] >= _CLEARLY * speeds[choice.place] else choice


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(map(mul, values, weights)) / sum(weights)
