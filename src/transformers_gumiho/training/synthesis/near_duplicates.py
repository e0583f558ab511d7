"""Finding texts that say nearly the same as one before, among millions (MinHash)."""

import re
import zlib
from collections import defaultdict

import numpy as np


# Texts that share so much of their pairs of words are near-duplicates.
SIMILARITY = 0.7
# Two texts of that similarity share a band with a probability of 1 - (1 - 0.7**4)**16 = 99%.
_BANDS, _ROWS_PER_BAND = 16, 4
_PRIME = (1 << 31) - 1
_WORD = re.compile(r"\w+")


class NearDuplicates:
    """Remembers texts, and finds new ones that are nearly the same as one of them."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        shape = (_BANDS * _ROWS_PER_BAND, 1)
        self._factors = random.integers(1, _PRIME, shape, dtype=np.uint64)
        self._offsets = random.integers(0, _PRIME, shape, dtype=np.uint64)
        self._kept: list[frozenset[int]] = []
        self._bands: dict[tuple[int, bytes], list[int]] = defaultdict(list)

    def add(self, text: str) -> bool:
        """Remembers a text that is not nearly the same as one before; returns whether it was remembered."""
        pairs = _pairs_of_words(text)
        bands = self._bands_of(pairs)
        candidates = {index for band in bands for index in self._bands.get(band, ())}
        for kept in map(self._kept.__getitem__, candidates):
            if len(pairs & kept) >= SIMILARITY * len(pairs | kept):
                return False
        for band in bands:
            self._bands[band].append(len(self._kept))
        self._kept.append(pairs)
        return True

    def _bands_of(self, pairs: frozenset[int]) -> list[tuple[int, bytes]]:
        hashes = np.fromiter(pairs, dtype=np.uint64, count=len(pairs)) % _PRIME
        least = ((self._factors * hashes + self._offsets) % _PRIME).min(axis=1)
        return [(index, band.tobytes()) for index, band in enumerate(least.reshape(_BANDS, _ROWS_PER_BAND))]


def _pairs_of_words(text: str) -> frozenset[int]:
    """Returns hashes of the pairs of neighboring words; a text of one word is a pair with nothing."""
    words = _WORD.findall(text.lower()) or [text]
    pairs = zip(words, words[1:] or [""], strict=False)
    return frozenset(zlib.crc32(" ".join(pair).encode()) for pair in pairs)
