"""The tokens that may be drafted: all, the drafter's own list, or one that is counted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .trees import Tree


# Of a smaller draft vocabulary the output head costs so little that cutting it further saves nothing.
SMALLEST_VOCABULARY = 2048


@dataclass(frozen=True)
class Vocabularies:
    """
    What may be drafted from.

    Attributes:
        vocab_size: Tokens of the target.
        has_own: Whether the drafter came with a list.
    """

    vocab_size: int
    has_own: bool

    @property
    def counted_size(self) -> int:
        """Tokens of the counted list."""
        return max(self.vocab_size // 4, SMALLEST_VOCABULARY)

    def list_trees(self, winner: Tree) -> list[Tree]:
        """Returns the winner with each vocabulary; one alone where there is nothing to choose from."""
        trees = [winner, replace(winner, vocabulary="all")] if self.has_own else [winner]
        if self.counted_size < self.vocab_size:
            trees.append(replace(winner, vocabulary="counted"))
        return trees

    def count(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """
        Returns the tokens that occur most often in texts. Equally frequent ones are in the order of their ids: where a
        vocabulary was made by merging, that is by frequency as well.
        """
        counts = torch.zeros(self.vocab_size, dtype=torch.long)
        for text in texts:
            counts += torch.bincount(torch.tensor(text), minlength=self.vocab_size)[: self.vocab_size]
        return counts.argsort(descending=True, stable=True)[: self.counted_size].tolist()
