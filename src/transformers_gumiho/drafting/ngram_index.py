"""An index of the n-grams of a text, which grows with the text."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


# Longer matches are as reliable as matches of this length.
LONGEST_MATCH = 32
# Longer n-grams are not stored, to save memory: each size has an entry for every token of the text.
LONGEST_NGRAM = 8


@dataclass(frozen=True)
class Match:
    """
    An earlier occurrence of the newest tokens of a text.

    Attributes:
        start: Index of the token after the occurrence.
        length: Number of newest tokens that occur there, at most [`LONGEST_MATCH`].
    """

    start: int
    length: int


class NgramIndex:
    """
    The newest occurrence of every n-gram of a text. Each token is added once; the text is never searched.

    Args:
        max_size: Length of the longest n-grams, in tokens. Values above [`LONGEST_NGRAM`] have no effect.
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

    def match(self) -> Match | None:
        """Returns the newest earlier occurrence of the longest n-gram at the end of the text, if any."""
        for size in range(min(len(self._followers), len(self.tokens) - 1), 0, -1):
            start = self._followers[size - 1].get(tuple(self.tokens[-size:]))
            if start is not None:
                return Match(start, self._match_length(start, size))
        return None

    def continuation(self, match: Match, num_tokens: int) -> list[int]:
        """Returns the tokens after a match. If the text ends, they repeat from the start of the match."""
        period = len(self.tokens) - match.start
        return [self.tokens[match.start + offset % period] for offset in range(num_tokens)]

    def _match_length(self, start: int, length: int) -> int:
        tokens = self.tokens
        while length < min(start, LONGEST_MATCH) and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
