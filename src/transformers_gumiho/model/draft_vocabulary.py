"""Draft vocabularies: the tokens that may be drafted, as settings and as entries of checkpoints of EAGLE drafters."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ..commands import UserValueError


# A checkpoint's entries of a draft vocabulary: token ids (`token_map`), or their distances from the draft's own
# indices (`d2t`). A mask of the same tokens may come with it.
VOCABULARY_ENTRY = re.compile(r"(?:model\.){0,2}(token_map|d2t)")
VOCABULARY_MASK = re.compile(r"(?:model\.){0,2}t2d")


def entry_token_ids(key: str, entry: Any, vocab_size: int, name_or_path: Any) -> list[int]:
    """
    Returns the token ids that a checkpoint's entry stands for.

    Raises:
        ValueError: It does not name distinct token ids of the vocabulary.
    """
    where = f"In the checkpoint {str(name_or_path)!r}, `{key}`"
    values = torch.as_tensor(entry)
    if values.ndim != 1 or values.is_floating_point() or values.dtype == torch.bool:
        raise UserValueError(
            f"{where} must be 1-D and of integers, got {values.dtype} of shape {tuple(values.shape)}. Correct it, or "
            f"take it out to draft from all of the vocabulary."
        )
    values = values.long()
    if key.endswith("d2t"):
        values = values + torch.arange(len(values), device=values.device)
    token_ids = values.tolist()
    if fault := vocabulary_fault(token_ids, vocab_size):
        raise UserValueError(
            f"{where} must name distinct token ids from 0 to {vocab_size - 1}, but {fault}. Correct it, or take it "
            f"out to draft from all of the vocabulary."
        )
    return token_ids


def check_vocabulary_mask(mask: Any, token_ids: Sequence[int], name_or_path: Any) -> None:
    """
    Raises `ValueError` where a checkpoint's mask `t2d` marks other tokens than its `d2t` names, `token_ids`. One that
    marks none was never filled: only trainings read it.
    """
    marked = set(torch.as_tensor(mask).flatten().nonzero().flatten().tolist())
    different = sorted(marked.symmetric_difference(token_ids))
    if marked and different:
        raise UserValueError(
            f"In the checkpoint {str(name_or_path)!r}, `t2d` marks other tokens than `d2t` names, such as "
            f"{different[0]}, so one of them is wrong. Download the head again, or take `t2d` out if `d2t` is right."
        )


def vocabulary_fault(token_ids: Any, vocab_size: int) -> str | None:
    """
    Returns why `token_ids` is no list (or tuple) of distinct token ids below `vocab_size`, at least one, as the end of
    a sentence; `None` where it is one.
    """
    if not isinstance(token_ids, (list, tuple)):
        return f"it is of type {type(token_ids).__name__}"
    if not token_ids:
        return "it is empty"
    # Each check is one pass in C: they run in every call of `generate()`, over tens of thousands of tokens.
    if set(map(type, token_ids)) != {int}:
        return f"it holds {next(token for token in token_ids if type(token) is not int)!r}"
    for extreme in (min(token_ids), max(token_ids)):
        if not 0 <= extreme < vocab_size:
            return f"it holds {extreme}"
    if len(set(token_ids)) < len(token_ids):
        return f"it holds {Counter(token_ids).most_common(1)[0][0]} more than once"
    return None
