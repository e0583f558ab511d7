"""Which tokens occur most often in prompts and in what the target answers to them."""

from collections.abc import Iterable, Sequence

import torch

from .answers import Answer


def rank_tokens(answers: Iterable[Answer], vocab_size: int) -> list[int]:
    """
    Returns all token ids below `vocab_size`, those that occur most often in the prompts and answers first.

    Equally frequent ones, such as all that do not occur, are in the order of their ids: that is the order of merges
    where a vocabulary was made by merging, and so goes by frequency as well.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for answer in answers:
        counts += torch.bincount(answer.tokens, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True).tolist()


def rank_on_other_half(answers: Sequence[Answer], vocab_size: int) -> list[list[int]]:
    """
    Returns for each answer the ranking of the token ids below `vocab_size`, counted on the half that it is not in
    (every other answer), so that what is measured on it does not flatter a vocabulary that was counted on it. Needs
    two answers at least.
    """
    of_other_half = [rank_tokens(answers[1 - half :: 2], vocab_size) for half in (0, 1)]
    return [of_other_half[row % 2] for row in range(len(answers))]
