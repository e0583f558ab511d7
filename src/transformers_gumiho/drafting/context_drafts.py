"""Drafts from the context: how the text went on where its newest tokens stood before."""

import math
from collections.abc import Callable, Sequence

import torch

from .context_branch import ContextBranch
from .ngram_index import LONGEST_MATCH, NgramIndex


# Lengths of matches up to each of these are counted together, with those beyond the last one.
_BOUNDS = (1, 2, 4, 8, 16)
# How often the token behind a match of these lengths is taken to be the next one before anything was counted: as often
# as it was in a small chat model's answers to prompts of its own. That stands for so many counts, of which these last.
_EXPECTED = (0.2, 0.42, 0.64, 0.77, 0.87, 0.97)
_EXPECTED_COUNT = 8.0
_LASTING_COUNT = 0.5
# What a count is worth after each one that follows: what a text does changes within it.
_FORGETTING = 0.95
# Below this a draft is not worth being compared with those of the drafter.
_MIN_ESTIMATE = 0.02
# The longest run, in numbers of tokens that are drafted otherwise, and in tokens: the logits of each take memory.
_MOST_DRAFTS_OF_RUN, _MOST_TOKENS_OF_RUN = 4, 64


class MatchEstimates:
    """How often the token behind a match is the next one: counted during a generation, by the length of the match."""

    def __init__(self) -> None:
        fading = _EXPECTED_COUNT - _LASTING_COUNT
        self._hits = [fading * expected for expected in _EXPECTED]
        self._counts = [fading] * len(_EXPECTED)

    def probability(self, length: int) -> float:
        """Returns the estimate for a match of `length` tokens, between 0 and 1, both excluded."""
        kind = _KINDS[min(length, LONGEST_MATCH)]
        return (self._hits[kind] + _EXPECTED[kind] * _LASTING_COUNT) / (self._counts[kind] + _LASTING_COUNT)

    def count(self, length: int, is_hit: bool) -> None:
        """Counts whether the token behind a match of `length` tokens was the next one."""
        kind = _KINDS[min(length, LONGEST_MATCH)]
        self._hits[kind] = _FORGETTING * self._hits[kind] + is_hit
        self._counts[kind] = _FORGETTING * self._counts[kind] + 1.0


_KINDS = [sum(length > bound for bound in _BOUNDS) for length in range(LONGEST_MATCH + 1)]


class RowDrafts:
    """
    The drafts from the context of one text.

    Args:
        num_tokens: The most drafted tokens.
        max_ngram_size: The longest n-grams that are looked up.

    Attributes:
        run_length: Twice as many tokens as the newest drafts, where all of these were right, at most [`longest_run`].
            Else 0.
    """

    def __init__(self, num_tokens: int, max_ngram_size: int):
        self.num_tokens = num_tokens
        self.run_length = 0
        self.estimates = MatchEstimates()
        self._index = NgramIndex(max_ngram_size)
        self._drafted: list[int] = []
        self._match_length = 0

    def extend(self, tokens: list[int]) -> int:
        """
        Adds committed tokens to the text; the newest drafts are counted by them, whether or not they were run.

        Returns:
            How many of the newest drafts were right, as far as they were verified.
        """
        num_right = 0
        for place, (token, drafted) in enumerate(zip(tokens, self._drafted, strict=False)):
            self.estimates.count(self._match_length + place, token == drafted)
            if token != drafted:
                break
            num_right += 1
        are_all_right = 0 < len(self._drafted) == num_right
        self.run_length = min(2 * num_right, longest_run(self.num_tokens)) if are_all_right else 0
        self._index.extend(tokens)
        self._drafted = []
        return num_right

    def draft(self, num_tokens: int | None = None) -> tuple[list[int], list[float]]:
        """
        Returns `num_tokens` drafted tokens (default: as many as ever), none without a match, and the estimate of each
        if those before it are right.
        """
        num_tokens = self.num_tokens if num_tokens is None else num_tokens
        match = self._index.match()
        if match is None:
            return [], []
        self._match_length = match.length
        self._drafted = self._index.continuation(match, num_tokens)
        # A token that is accepted makes the match longer by one.
        lengths = range(match.length, match.length + num_tokens)
        return self._drafted, [self.estimates.probability(length) for length in lengths]


def longest_run(num_tokens: int) -> int:
    """Returns the most tokens of a run where `num_tokens` are drafted otherwise."""
    return min(_MOST_DRAFTS_OF_RUN * num_tokens, _MOST_TOKENS_OF_RUN)


class ContextDrafts:
    """
    The drafts from the context of all rows of a generation.

    Args:
        read_text: Returns the tokens of each row from an index on, for such an index of each row.
        starts: Where the text of each row begins: behind padding.
        num_tokens: As in [`RowDrafts`].
        max_ngram_size: As in [`RowDrafts`].
        vocab_size: Other tokens are no part of the text (those that stand for an image).

    Attributes:
        num_right: Of the drafts before the newest ones, how many were right in each row.
    """

    def __init__(
        self,
        read_text: Callable[[list[int]], list[list[int]]],
        starts: Sequence[int],
        num_tokens: int,
        max_ngram_size: int,
        vocab_size: int,
    ):
        self.num_tokens = num_tokens
        self.num_right = [0] * len(starts)
        self._read_text = read_text
        self._known = list(starts)
        self._vocab_size = vocab_size
        self._rows = [RowDrafts(num_tokens, max_ngram_size) for _ in starts]

    def draft(self, device: torch.device, run_lengths: range = range(0)) -> ContextBranch | None:
        """
        Takes in what was committed since the last call, and drafts on from there: `num_tokens` in each row, but for
        those in which nothing is drafted. `None` where that is so in all rows. A text alone whose newest drafts were
        all right goes on with more of them, a run.

        Args:
            device: Where the branch is needed.
            run_lengths: How many tokens a run may have (default: there is none).
        """
        texts = self._read_text(self._known)
        self._known = [known + len(text) for known, text in zip(self._known, texts, strict=True)]
        new = [[token for token in text if 0 <= token < self._vocab_size] for text in texts]
        self.num_right = [row.extend(tokens) for row, tokens in zip(self._rows, new, strict=True)]
        run_length = self._run_length(run_lengths)
        width = run_length or self.num_tokens
        drafts = [_draft_row(row, width) for row in self._rows]
        if all(draft is None for draft in drafts):
            return None
        none = [0] * width, [-math.inf] * width
        tokens, log_probs = zip(*(draft or none for draft in drafts), strict=True)
        return ContextBranch.make(tokens, log_probs, device, is_run=run_length > 0)

    def _run_length(self, lengths: range) -> int:
        """Returns how many tokens the context drafts in a run, 0 where it makes none."""
        # Rows of a batch seldom go on all at once, and what is a run in one would be lost on the others.
        if len(self._rows) > 1 or not lengths:
            return 0
        length = min(self._rows[0].run_length, lengths[-1])
        return length if length in lengths else 0


def _draft_row(row: RowDrafts, num_tokens: int) -> tuple[list[int], list[float]] | None:
    tokens, estimates = row.draft(num_tokens)
    if not tokens or estimates[0] < _MIN_ESTIMATE:
        return None
    return tokens, [math.log(estimate) for estimate in estimates]
