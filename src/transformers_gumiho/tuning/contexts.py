"""The contexts in which cycles are timed: as long as those in which answers are decoded."""

from collections.abc import Sequence

import numpy as np
import torch

from .answers import Answer


# Token ids `(B, T)` and their attention mask.
Rows = tuple[torch.Tensor, torch.Tensor]

# Of which means are taken.
_NUM_BATCHES = 10_000


def context_lengths(answers: Sequence[Answer], batch_size: int) -> np.ndarray:
    """
    Returns how many tokens `(batch_size,)` the rows have in the average step of decoding these answers in batches, the
    longest first. What a step costs grows with them.

    A batch is put together at random, of different answers if there are enough. It begins with as many tokens as the
    longest of its prompts has, shorter ones padded, and takes a step for each token of the longest of its answers, in
    which all rows grow by one.
    """
    prompts = np.array([answer.prompt_length for answer in answers])
    new = np.array([max(len(answer.new_tokens), 1) for answer in answers])
    generator, count = np.random.default_rng(0), len(answers)
    if batch_size == 1:
        picked = np.arange(count)[:, None]
    elif batch_size <= count:
        picked = generator.random((_NUM_BATCHES, count)).argsort(axis=1)[:, :batch_size]
    else:
        picked = generator.integers(count, size=(_NUM_BATCHES, batch_size))
    num_steps = new[picked].max(axis=1)
    longest_first = -np.sort(-prompts[picked], axis=1)
    return np.average(longest_first + num_steps[:, None] / 2, axis=0, weights=num_steps)


def typical_context(answers: Sequence[Answer], num_new_tokens: int) -> torch.Tensor:
    """
    Returns the beginning `(T,)` of one of the texts, after which `num_new_tokens` more are decoded in a context that
    is on average as long as in a step of decoding the answers one by one.
    """
    (length,) = context_lengths(answers, 1)
    longest = max(answers, key=lambda answer: len(answer.tokens))
    return longest.tokens[: max(round(length - num_new_tokens / 2), 1)]


def typical_rows(answers: Sequence[Answer], batch_size: int, most: int | None = None) -> Rows:
    """
    Returns beginnings of the texts `(batch_size, T)` and their attention mask: a batch in the average step of decoding
    the answers in batches ([`context_lengths`]), but of at most `most` tokens, and no longer than the longest text.
    Each row is shorter by at least a token than the one before it (but for single tokens), with as much padding on the
    left, where other tokens of the text stand: a target that takes no padding reads them.

    Longer in larger batches, as all rows of a batch take the time of its longest one. Different texts as far as there
    are, as rows that are alike advance together, which costs less. Padded, as rows of different prompts nearly always
    are: passes with a mask take other ways through attention than passes without one.
    """
    texts, places = [answer.tokens for answer in answers], np.arange(batch_size)
    of_rows = context_lengths(answers, batch_size).round().astype(int)
    longest = max(map(len, texts))
    of_rows -= max(of_rows[0] - (longest if most is None else min(longest, most)), 0)
    lengths = (np.minimum.accumulate(of_rows + places) - places).clip(min=1)
    columns = torch.arange(lengths[0]) - torch.from_numpy(lengths[0] - lengths)[:, None]  # below 0 where padded
    num_uses, ids = [0] * len(texts), []
    for row, length in enumerate(lengths):
        long_enough = [number for number, text in enumerate(texts) if len(text) >= length]
        number = min(long_enough, key=num_uses.__getitem__)
        num_uses[number] += 1
        ids.append(texts[number][columns[row] % len(texts[number])])
    return torch.stack(ids), (columns >= 0).long()


def ending_before(rows: Rows, num_new_tokens: int) -> Rows:
    """
    Returns the rows without so many of their last tokens that a run of new ones has, on average, the whole rows for a
    context. Of a row that is too short for that one token is left, one that stood before it where all were cut.
    """
    ids, mask = rows
    width = max(ids.shape[1] - num_new_tokens // 2, 1)
    mask = mask[:, :width].clone()
    mask[:, -1] = 1
    return ids[:, :width], mask
