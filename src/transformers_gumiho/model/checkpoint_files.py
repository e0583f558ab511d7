"""The files of a checkpoint: where they are, which tensors they hold, and reading some of them."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from ..commands import UserOSError
from ..files import PLACES, damaged_files_named


def plain_name(key: str) -> str:
    """Returns the name of a drafter's tensor without the prefixes that other tools write before it."""
    name = re.sub(r"^(?:model\.){0,2}midlayer\.", "layers.0.", key)
    name = re.sub(r"^encoder\.", "", re.sub(r"^(?:model\.){1,2}", "", name))
    return re.sub(r"^mlp\.mlp\.", "mlp.", name.replace("output_norm_enc.", "hidden_norm."))


def tensor_files(name_or_path: Any, options: Mapping[str, Any]) -> dict[str, str]:
    """
    Returns the names of the tensors of a checkpoint in safetensors, each with the name of its file. Of a checkpoint in
    several files only the index is read. `name_or_path` is a folder, a file, or a name on the Hub, and `options` are
    the arguments of `from_pretrained`, also in the other functions.
    """
    first = _file_or_index(name_or_path, options)
    if first is None or first.suffix == ".json":
        return {} if first is None else _shards_of(first, name_or_path)
    if first.suffix != ".safetensors":
        return {}
    with damaged_files_named(name_or_path, options), safe_open(first, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), first.name)


def cached(name_or_path: Any, file: str, options: Mapping[str, Any]) -> Path:
    """Returns the path of a file of a checkpoint. Raises `OSError` where there is none."""
    places = {name: options[name] for name in PLACES if options.get(name) is not None}
    return Path(str(cached_file(name_or_path, file, **places)))


def _file_or_index(name_or_path: Any, options: Mapping[str, Any]) -> Path | None:
    """Returns the file of a checkpoint, or the index of one in several files; `None` where there is neither."""
    if os.path.isfile(name_or_path):
        return Path(name_or_path)
    names = [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME]
    if options.get("use_safetensors") is False:
        del names[:2]
    for name in names:
        if variant := options.get("variant"):
            stem, _, suffix = name.rpartition(".")
            name = f"{stem}.{variant}.{suffix}"
        with suppress(OSError):  # there is no such file
            return cached(name_or_path, name, options)
    return None


def _shards_of(index: Path, name_or_path: Any) -> dict[str, str]:
    shards = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    if not isinstance(shards, dict):
        raise UserOSError(
            f"`{index.name}` of {str(name_or_path)!r} is damaged: it has no `weight_map`. Download it again."
        )
    return shards


def tensor_shapes(name_or_path: Any, options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """
    Returns the shape of each tensor of a checkpoint by its plain name, without reading the tensors. There are none
    where no weight file is found.
    """
    with damaged_files_named(name_or_path, options):
        return {plain_name(key): shape for key, shape, _ in _entries(name_or_path, options, "meta")}


def stored_dtype(name_or_path: Any, options: Mapping[str, Any]) -> torch.dtype:
    """Returns the narrowest dtype that holds all floating-point tensors of a checkpoint to the bit."""
    entries = [read() for *_, read in _entries(name_or_path, options, "meta")]
    tensors = [entry for entry in entries if isinstance(entry, torch.Tensor)]
    return reduce(torch.promote_types, {own.dtype for own in tensors if own.is_floating_point()})


def read_entry(name_or_path: Any, key: str, options: Mapping[str, Any]) -> Any:
    """Returns one entry of a checkpoint, under any prefix, without reading the others; `None` if there is none."""
    plain = plain_name(key)
    if options.get("state_dict") is not None:
        by_plain_name = {plain_name(name): entry for name, entry in options["state_dict"].items()}
        return by_plain_name.get(plain)
    for name, _, read in _entries(name_or_path, options, "cpu"):
        if plain_name(name) == plain:
            return read()
    return None


def _entries(
    name_or_path: Any, options: Mapping[str, Any], device: str
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Any]]]:
    """Yields names and shapes of a checkpoint's entries, and functions that read them: pickles to this device."""
    first = _file_or_index(name_or_path, options)
    files = [] if first is None else [first]
    if first is not None and first.suffix == ".json":
        shards = sorted(set(_shards_of(first, name_or_path).values()))
        files = [cached(name_or_path, shard, options) for shard in shards]
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (not a dict)
                    yield key, tuple(tensors.get_slice(key).get_shape()), partial(tensors.get_tensor, key)
        else:
            for key, entry in _load_pickle(file, device).items():
                yield key, tuple(getattr(entry, "shape", ())), partial(lambda entry: entry, entry)


def _load_pickle(file: Path, device: str) -> dict[str, Any]:
    # Files of before PyTorch 1.6 are no archives, and cannot be mapped into memory.
    entries = torch.load(file, map_location=device, weights_only=True, mmap=is_zipfile(file))
    if not isinstance(entries, dict):
        raise UserOSError(f"`{file}` is damaged: it holds no tensors by name. Download it again.")
    return entries
