"""The tokens that may be drafted: all, the drafter's own list, or one that is counted."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from .trees import Tree


# Cutting the output head below it saves next to nothing.
_MIN_COUNTED = 2048


def list_vocabularies(winner: Tree, vocab_size: int) -> list[Tree]:
    """Returns a tree with each vocabulary that may compete, beginning with its own."""
    trees = [winner, replace(winner, vocabulary="all"), replace(winner, vocabulary="counted")]
    return list(dict.fromkeys(trees[: 3 if _num_counted(vocab_size) < vocab_size else 2]))


def count_tokens(texts: Iterable[Sequence[int]], vocab_size: int) -> list[int]:
    """
    Returns the tokens that occur most often, a quarter of all. Equally frequent ones are in the order of their ids:
    where a vocabulary was made by merging, the lower one is the more frequent one.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for text in texts:
        counts += torch.bincount(torch.tensor(text), minlength=vocab_size)[:vocab_size]
    return counts.argsort(descending=True, stable=True)[: _num_counted(vocab_size)].tolist()


def _num_counted(vocab_size: int) -> int:
    return max(vocab_size // 4, _MIN_COUNTED)
