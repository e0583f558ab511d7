"""Prompt-lookup drafts: the tokens that followed when the text's newest tokens occurred before."""

import itertools
import math
from collections.abc import Callable, Sequence

import torch

from ..tree.uploads import upload


# Longer matches are as reliable as matches of this length.
LONGEST_MATCH = 32
# Longer n-grams are not stored, to save memory: each size has an entry for every token of the text.
LONGEST_NGRAM = 8
# Matches are counted in groups by their length: up to each of these bounds, and longer ones.
_BOUNDS = (1, 2, 4, 8, 16)
# Prior probability of each group that the token after a match is the next one, measured on a small chat model's
# answers to its own prompts. The prior is worth 8 pseudo-counts, 0.5 of which never decay.
_EXPECTED = (0.2, 0.42, 0.64, 0.77, 0.87, 0.97)
_EXPECTED_COUNT = 8.0
_LASTING_COUNT = 0.5
# Factor by which each new count lowers the weight of earlier ones, because texts change.
_DECAY = 0.95
# Drafts that are less probable than this are dropped.
_MIN_ESTIMATE = 0.02


# A drafted path in each row: its tokens `(B, M)` from depth 1 down, and the summed log-probabilities (nats) of the
# tokens down to each, `(B, M)`; minus infinity in rows without a draft.
ContextBranch = tuple[torch.Tensor, torch.Tensor]


class MatchEstimates:
    """Probabilities that the token after a match is the next one, counted in a generation by the match's length."""

    def __init__(self) -> None:
        decaying = _EXPECTED_COUNT - _LASTING_COUNT
        self._hits = [decaying * expected for expected in _EXPECTED]
        self._counts = [decaying] * len(_EXPECTED)

    def probability(self, length: int) -> float:
        """Returns the estimate for a match of `length` tokens, between 0 and 1, both excluded."""
        group = _GROUPS[min(length, LONGEST_MATCH)]
        hits = self._hits[group] + _EXPECTED[group] * _LASTING_COUNT
        return hits / (self._counts[group] + _LASTING_COUNT)

    def count(self, length: int, is_hit: bool) -> None:
        """Counts whether the token after a match of `length` tokens was the next one."""
        group = _GROUPS[min(length, LONGEST_MATCH)]
        self._hits[group] = _DECAY * self._hits[group] + is_hit
        self._counts[group] = _DECAY * self._counts[group] + 1.0


_GROUPS = [sum(length > bound for bound in _BOUNDS) for length in range(LONGEST_MATCH + 1)]


class NgramIndex:
    """
    The newest occurrence of every n-gram of a text, of at most `max_size` or [`LONGEST_NGRAM`] tokens. Each token is
    added once; the text is never searched.
    """

    def __init__(self, max_size: int):
        self.tokens: list[int] = []
        # For each size and n-gram: index of the token after its newest occurrence that has a token after it.
        self._followers: list[dict[tuple[int, ...], int]] = [{} for _ in range(min(max_size, LONGEST_NGRAM))]

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens to the text."""
        known = len(self.tokens)
        self.tokens.extend(tokens)
        for size, followers in enumerate(self._followers, start=1):
            # Begin with the n-gram that ended the text before: only now a token follows it.
            first = max(known - size, 0)
            followed = self.tokens[first:-1]
            ngrams = zip(*(followed[offset:] for offset in range(size)), strict=False)
            followers.update(zip(ngrams, itertools.count(first + size), strict=False))

    def match(self) -> tuple[int, int] | None:
        """
        Returns the newest earlier occurrence of the longest n-gram at the end of the text, if any: the index after it,
        and how many of the newest tokens are the same there, at most [`LONGEST_MATCH`].
        """
        for size in range(min(len(self._followers), len(self.tokens) - 1), 0, -1):
            start = self._followers[size - 1].get(tuple(self.tokens[-size:]))
            if start is not None:
                return start, self._match_length(start, size)
        return None

    def continuation(self, start: int, num_tokens: int) -> list[int]:
        """Returns the tokens after a match, from index `start` on. Where the text ends, they repeat from there."""
        period = len(self.tokens) - start
        return [self.tokens[start + offset % period] for offset in range(num_tokens)]

    def _match_length(self, start: int, length: int) -> int:
        tokens = self.tokens
        while length < min(start, LONGEST_MATCH) and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


class RowDrafts:
    """The prompt-lookup drafts of one row, of `num_tokens` tokens."""

    def __init__(self, num_tokens: int, max_ngram_size: int):
        self.num_tokens = num_tokens
        self.estimates = MatchEstimates()
        self._index = NgramIndex(max_ngram_size)
        self._drafted: list[int] = []
        self._match_length = 0

    def extend(self, tokens: list[int]) -> int:
        """Adds committed tokens. Returns how many tokens of the newest draft were right, whether verified or not."""
        num_right = 0
        for offset, (token, drafted) in enumerate(zip(tokens, self._drafted, strict=False)):
            self.estimates.count(self._match_length + offset, token == drafted)
            if token != drafted:
                break
            num_right += 1
        self._index.extend(tokens)
        self._drafted = []
        return num_right

    def draft(self) -> tuple[list[int], list[float]]:
        """Returns drafted tokens, and the probability of each after those before it; none without a match."""
        match = self._index.match()
        if match is None:
            return [], []
        start, self._match_length = match
        self._drafted = self._index.continuation(start, self.num_tokens)
        # Each accepted token makes the match longer by one.
        lengths = range(self._match_length, self._match_length + self.num_tokens)
        return self._drafted, [self.estimates.probability(length) for length in lengths]


class ContextDrafts:
    """
    The prompt-lookup drafts of all rows in a generation. `num_right` counts, for each row, how many tokens of the
    draft before the newest one were right.

    Args:
        read_text: Takes an index for each row, and returns the row's tokens from it on.
        starts: Index of the first token after the padding in each row.
        num_tokens: Number of drafted tokens.
        max_ngram_size: Longest n-gram that is looked up.
        vocab_size: Tokens outside the vocabulary, which mark images, are skipped.
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
        Reads what was committed since the last call, and drafts `num_tokens` tokens for each row with a match. Returns
        the branch on `device`, or `None` if no row has a draft.
        """
        texts = self._read_text(self._known)
        self._known = [known + len(text) for known, text in zip(self._known, texts, strict=True)]
        new = [[token for token in text if 0 <= token < self._vocab_size] for text in texts]
        self.num_right = [row.extend(tokens) for row, tokens in zip(self._rows, new, strict=True)]
        tokens = [[0] * self.num_tokens for _ in texts]
        scores = [[-math.inf] * self.num_tokens for _ in texts]
        for index, row in enumerate(self._rows):
            drafted, estimates = row.draft()
            if drafted and estimates[0] >= _MIN_ESTIMATE:
                tokens[index], scores[index] = drafted, list(itertools.accumulate(map(math.log, estimates)))
        if all(of_row[0] == -math.inf for of_row in scores):
            return None
        return upload(tokens, device), upload(scores, device, torch.float32)
