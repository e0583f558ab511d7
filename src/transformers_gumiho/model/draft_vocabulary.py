"""The tokens that a drafter may draft: how they are chosen, and where released checkpoints keep theirs."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from transformers import GenerationConfig
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)


# Names under which drafters of the EAGLE kind carry their vocabulary: token ids as they are, or their distances from
# the draft's own indices. Next to the latter, `_MEMBERSHIP` may hold the same as a mask.
_TOKEN_MAP, _OFFSETS, _MEMBERSHIP = "token_map", "d2t", "t2d"
_HUB_OPTIONS = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")


def find_fault(token_ids: Any, vocab_size: int) -> str | None:
    """
    Returns what keeps `token_ids` from being a list (or tuple) of at least one and only distinct token ids below
    `vocab_size`, as the end of a sentence; `None` where nothing does.
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


def choose_draft_vocabulary(
    counts: torch.Tensor, size: int, kept: Iterable[int] = (), own: Iterable[int] = ()
) -> list[int]:
    """
    Returns the `size` tokens of the highest counts `(V,)`, the most frequent first. Those in `kept` are always among
    them, and those in `own` come before all others; equally frequent ones, such as all that do not occur, go by their
    ids.

    Raises:
        ValueError: There are fewer than `size` tokens, or more than that to be kept.
    """
    always = set(kept)
    check_size(size, len(counts), len(always))
    ranking = counts.argsort(descending=True, stable=True).tolist()
    first = set(own)
    others = sorted((token for token in ranking if token not in always), key=lambda token: token not in first)
    chosen = always.union(others[: size - len(always)])
    return [token for token in ranking if token in chosen]


def check_size(size: int, vocab_size: int, num_kept: int) -> None:
    """Raises `ValueError` for a draft vocabulary of more tokens than there are, or of fewer than are always kept."""
    smallest = max(num_kept, 1)
    if not smallest <= size <= vocab_size:
        raise ValueError(
            f"`draft_vocabulary_size` must be from {smallest} (tokens that end a text are always in the vocabulary) "
            f"to the target's {vocab_size} tokens, got {size}. Choose a size in between, or `None` for all tokens."
        )


def adopt_released_vocabulary(
    generation_config: GenerationConfig,
    unexpected_keys: Iterable[str],
    vocab_size: int,
    name_or_path: Any,
    options: Mapping[str, Any],
) -> set[str]:
    """
    Makes the draft vocabulary that a checkpoint carries as a tensor a setting, unless the settings have one.

    Args:
        generation_config: The drafter's; `draft_vocabulary` is set.
        unexpected_keys: The checkpoint's entries that the model has no place for.
        vocab_size: The drafter's.
        name_or_path: The checkpoint.
        options: What else `from_pretrained` was given.

    Returns:
        The entries that are still unexpected.

    Raises:
        ValueError: The checkpoint carries several vocabularies, or one that does not fit the drafter.
    """
    unexpected = set(unexpected_keys)
    keys = sorted(key for key in unexpected if is_vocabulary_entry(key))
    if not keys:
        return unexpected
    if len(keys) > 1:
        raise ValueError(
            f"The checkpoint {str(name_or_path)!r} carries its draft vocabulary more than once: {', '.join(keys)}. "
            f"Keep one of them."
        )
    key = keys[0]
    if generation_config.draft_vocabulary is None:
        entry = _read_entry(name_or_path, key, options)
        if entry is None:
            return unexpected
        generation_config.draft_vocabulary = entry_token_ids(key, entry, vocab_size, name_or_path)
    redundant = {other for other in unexpected if is_vocabulary_mask(other)}
    return unexpected - {key} - (redundant if _plain_name(key) == _OFFSETS else set())


def _plain_name(key: str) -> str:
    return re.sub(r"^(?:model\.){1,2}", "", key)


def is_vocabulary_entry(key: str) -> bool:
    """Returns whether a checkpoint's entry of this name is a draft vocabulary."""
    return _plain_name(key) in (_TOKEN_MAP, _OFFSETS)


def is_vocabulary_mask(key: str) -> bool:
    """Returns whether a checkpoint's entry of this name repeats a draft vocabulary as a mask."""
    return _plain_name(key) == _MEMBERSHIP


def entry_token_ids(key: str, entry: Any, vocab_size: int, name_or_path: Any) -> list[int]:
    """
    Returns the token ids that a checkpoint's entry stands for.

    Raises:
        ValueError: It does not name distinct token ids of the vocabulary.
    """
    values, where = torch.as_tensor(entry), f"In the checkpoint {str(name_or_path)!r}, `{key}`"
    if values.ndim != 1 or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError(
            f"{where} must be 1-D and of integers, got {values.dtype} of shape {tuple(values.shape)}. Correct it, or "
            f"take it out to draft from all of the vocabulary."
        )
    values = values.long()
    if _plain_name(key) == _OFFSETS:
        values = values + torch.arange(len(values))
    token_ids = values.tolist()
    if fault := find_fault(token_ids, vocab_size):
        raise ValueError(
            f"{where} must name distinct token ids from 0 to {vocab_size - 1}, but {fault}. Correct it, or take it "
            f"out to draft from all of the vocabulary."
        )
    return token_ids


def _read_entry(name_or_path: Any, key: str, options: Mapping[str, Any]) -> Any:
    """Returns one entry of a checkpoint, without reading the others; `None` where it cannot be found."""
    if options.get("state_dict") is not None:
        return options["state_dict"].get(key)
    path = _find_file(name_or_path, key, options)
    if path is None:
        return None
    if path.endswith(".safetensors"):
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(key) if key in file.keys() else None  # noqa: SIM118 (not a dict)
    # Files of before PyTorch 1.6 are no archives, and cannot be mapped into memory.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path)).get(key)


def _find_file(name_or_path: Any, key: str, options: Mapping[str, Any]) -> str | None:
    """Returns the weight file that holds `key`, of those that `from_pretrained` looks for, in its order."""
    if os.path.isfile(name_or_path):
        return str(name_or_path)
    names = [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME] if options.get("use_safetensors") is not False else []
    hub_options = {name: options[name] for name in _HUB_OPTIONS if options.get(name) is not None}
    for name in (*names, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        if variant := options.get("variant"):
            name = f"{name.rpartition('.')[0]}.{variant}.{name.rpartition('.')[2]}"
        try:
            path = cached_file(name_or_path, name, **hub_options)
            if path is not None and name.endswith(".json"):
                shard = json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"].get(key)
                path = shard and cached_file(name_or_path, shard, **hub_options)
        except OSError:  # there is no such file
            continue
        if path is not None:
            return path
    return None
