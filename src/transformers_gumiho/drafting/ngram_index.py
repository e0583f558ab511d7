"""Where the newest tokens of a text stood before: an index that grows with the text."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


# Beyond this a longer match says no more.
LONGEST_MATCH = 32
# Longer n-grams are not kept: each size takes an entry for every token of the text, as long as the n-gram.
LONGEST_NGRAM = 8


@dataclass(frozen=True)
class Match:
    """
    An earlier place where the newest tokens of a text stood.

    Attributes:
        start: Index of the token behind it.
        length: How many of the newest tokens stood there, at most [`LONGEST_MATCH`].
    """

    start: int
    length: int


class NgramIndex:
    """
    The newest place of every n-gram of a text. Each token is added once; the text is never searched.

    Args:
        max_size: The longest n-grams that are kept, in tokens; at most [`LONGEST_NGRAM`] of them.
    """

    def __init__(self, max_size: int):
        self.tokens: list[int] = []
        # For each size: the index of the token behind the newest place of each n-gram that has one behind it.
        self._followers: list[dict[tuple[int, ...], int]] = [{} for _ in range(min(max_size, LONGEST_NGRAM))]

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens to the text."""
        known = len(self.tokens)
        self.tokens.extend(tokens)
        for size, followers in enumerate(self._followers, start=1):
            # From the n-gram on that ended the text before: nothing stood behind it.
            first = max(known - size, 0)
            followed = self.tokens[first:-1]
            ngrams = zip(*(followed[offset:] for offset in range(size)), strict=False)
            followers.update(zip(ngrams, itertools.count(first + size), strict=False))

    def match(self) -> Match | None:
        """Returns the newest place of the longest n-gram that the text ends with and that stood there before."""
        for size in range(min(len(self._followers), len(self.tokens) - 1), 0, -1):
            start = self._followers[size - 1].get(tuple(self.tokens[-size:]))
            if start is not None:
                return Match(start, self._match_length(start, size))
        return None

    def continuation(self, match: Match, num_tokens: int) -> list[int]:
        """Returns what followed a match; where that is the end of the text, as if the text went on repeating it."""
        period = len(self.tokens) - match.start
        return [self.tokens[match.start + place % period] for place in range(num_tokens)]

    def _match_length(self, start: int, length: int) -> int:
        tokens = self.tokens
        while length < min(start, LONGEST_MATCH) and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
