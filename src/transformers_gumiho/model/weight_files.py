"""The weight files of a checkpoint: where they are, and what their headers say."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from .damaged_files import DamagedFileError


# The arguments of `from_pretrained` that say where files are.
PLACES = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")


def plain_name(key: str) -> str:
    """Returns the name of a drafter's tensor without the prefixes that other tools write before it."""
    name = re.sub(r"^(?:model\.){0,2}midlayer\.", "layers.0.", key)
    return re.sub(r"^mlp\.mlp\.", "mlp.", re.sub(r"^(?:model\.){1,2}", "", name))


def weight_files(name_or_path: Any, options: Mapping[str, Any]) -> list[Path]:
    """
    Returns the weight files that `from_pretrained` reads: one, or all shards. There are none where nothing is found.

    Args:
        name_or_path: A folder, a file, or a name on the Hub.
        options: The arguments of `from_pretrained`.
    """
    if os.path.isfile(name_or_path):
        return [Path(name_or_path)]
    names = [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME] if options.get("use_safetensors") is not False else []
    places = {name: options[name] for name in PLACES if options.get(name) is not None}
    for name in (*names, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        if variant := options.get("variant"):
            name = f"{name.rpartition('.')[0]}.{variant}.{name.rpartition('.')[2]}"
        try:
            file = Path(str(cached_file(name_or_path, name, **places)))
            if file.suffix != ".json":
                return [file]
            shards = sorted(set(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()))
            return [Path(str(cached_file(name_or_path, shard, **places))) for shard in shards]
        except OSError:  # there is no such file
            continue
    return []


def tensor_shapes(name_or_path: Any, options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """
    Returns the shape of each tensor of a checkpoint by its plain name, without reading the tensors. There are none
    where no weight file is found. The arguments are those of [`weight_files`].

    Raises:
        DamagedFileError: A safetensors file is truncated or damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    with damaged_weights_named(name_or_path, options):
        for file in weight_files(name_or_path, options):
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as tensors:
                    for key in tensors.keys():  # noqa: SIM118 (not a dict)
                        shapes[plain_name(key)] = tuple(tensors.get_slice(key).get_shape())
            else:
                entries = _load_pickle(file, "meta")
                shapes |= {plain_name(key): tuple(getattr(entry, "shape", ())) for key, entry in entries.items()}
    return shapes


def read_entry(name_or_path: Any, key: str, options: Mapping[str, Any]) -> Any:
    """Returns one entry of a checkpoint, without reading the others; `None` where it cannot be found."""
    if options.get("state_dict") is not None:
        return options["state_dict"].get(key)
    for file in weight_files(name_or_path, options):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                if key in tensors.keys():  # noqa: SIM118 (not a dict)
                    return tensors.get_tensor(key)
        elif key in (entries := _load_pickle(file, "cpu")):
            return entries[key]
    return None


def _load_pickle(file: Path, device: str) -> dict[str, Any]:
    # Files of before PyTorch 1.6 are no archives, and cannot be mapped into memory.
    entries: dict[str, Any] = torch.load(file, map_location=device, weights_only=True, mmap=is_zipfile(file))
    return entries


@contextmanager
def damaged_weights_named(name_or_path: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """
    Raises [`DamagedFileError`] where a safetensors file that is read within this is truncated or damaged. The
    arguments are those of [`weight_files`].
    """
    try:
        yield
    except SafetensorError as error:
        for file in weight_files(name_or_path, options):
            try:
                with safe_open(file, framework="pt"):
                    pass
            except SafetensorError as finding:
                raise DamagedFileError(file.name, name_or_path, str(finding)) from error
        raise
