"""Drafts from the context: how the text went on where its newest tokens stood before."""

import math
from collections.abc import Callable, Sequence

import torch

from .context_branch import ContextBranch
from .ngram_index import LONGEST_MATCH, NgramIndex


# Lengths of matches up to each of these are counted together, with those beyond the last one.
_BOUNDS = (1, 2, 4, 8, 16)
# How often the token behind a match of these lengths is taken to be the next one, before anything was counted; and for
# how many counts that stands. Texts that repeat their input go on as it does nearly always, once a few words agree.
_EXPECTED = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9)
_EXPECTED_COUNT = 4.0
# What a count is worth after each one that follows: what a text does changes within it.
_FORGETTING = 0.97
# Below this a draft is not worth being compared with those of the drafter.
_MIN_ESTIMATE = 0.02


class MatchEstimates:
    """How often the token behind a match is the next one: counted during a generation, by the length of the match."""

    def __init__(self) -> None:
        self._hits = [0.0] * len(_EXPECTED)
        self._counts = [0.0] * len(_EXPECTED)

    def probability(self, length: int) -> float:
        """Returns the estimate for a match of `length` tokens, between 0 and 1, both excluded."""
        kind = _KINDS[min(length, LONGEST_MATCH)]
        return (self._hits[kind] + _EXPECTED[kind] * _EXPECTED_COUNT) / (self._counts[kind] + _EXPECTED_COUNT)

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
    """

    def __init__(self, num_tokens: int, max_ngram_size: int):
        self.num_tokens = num_tokens
        self.estimates = MatchEstimates()
        self._index = NgramIndex(max_ngram_size)
        self._drafted: list[int] = []
        self._match_length = 0

    def extend(self, tokens: Sequence[int]) -> int:
        """
        Adds committed tokens to the text; the newest drafts are counted by them, whether or not they were run.

        Returns:
            How many of the newest drafts were right, as far as committed tokens tell.
        """
        num_right = 0
        for place, (token, drafted) in enumerate(zip(tokens, self._drafted, strict=False)):
            self.estimates.count(self._match_length + place, token == drafted)
            if token != drafted:
                break
            num_right += 1
        self._index.extend(tokens)
        self._drafted = []
        return num_right

    def draft(self) -> tuple[list[int], list[float]]:
        """Returns the drafted tokens, none without a match, and the estimate of each if those before it are right."""
        match = self._index.match()
        if match is None:
            return [], []
        self._match_length = match.length
        self._drafted = self._index.continuation(match, self.num_tokens)
        # A token that is accepted makes the match longer by one.
        lengths = range(match.length, match.length + self.num_tokens)
        return self._drafted, [self.estimates.probability(length) for length in lengths]


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

    def draft(self, device: torch.device) -> ContextBranch | None:
        """
        Takes in what was committed since the last call, and drafts on from there: `num_tokens` in each row, but for
        those in which nothing is drafted. `None` where that is so in all rows.

        Args:
            device: Where the branch is needed.
        """
        texts = self._read_text(self._known)
        self._known = [known + len(text) for known, text in zip(self._known, texts, strict=True)]
        new = [[token for token in text if 0 <= token < self._vocab_size] for text in texts]
        self.num_right = [row.extend(tokens) for row, tokens in zip(self._rows, new, strict=True)]
        drafts = [_draft_row(row) for row in self._rows]
        if all(draft is None for draft in drafts):
            return None
        none = [0] * self.num_tokens, [-math.inf] * self.num_tokens
        tokens, log_probs = zip(*(draft or none for draft in drafts), strict=True)
        return ContextBranch.make(tokens, log_probs, device)


def _draft_row(row: RowDrafts) -> tuple[list[int], list[float]] | None:
    tokens, estimates = row.draft()
    if not tokens or estimates[0] < _MIN_ESTIMATE:
        return None
    return tokens, [math.log(estimate) for estimate in estimates]
