"""
The files of a checkpoint: its config in every layout that there is, its weight files and what their headers say, and
errors that name a damaged file.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from transformers import LlamaConfig
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from ..user_errors import UserOSError, UserValueError
from .eagle_configs import claims_to_draft, eagle_fields


# The arguments of `from_pretrained` that say where files are.
PLACES = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
# In a wheel the configs are inside the package; a clone keeps them in its top-level folder.
_FOLDERS = (Path(__file__).parents[1] / "hub_configs", Path(__file__).parents[3] / "hub_configs")

# Of the released drafters, on the Hub.
_OWNER = "amd"

# A Llama of more layers is taken for a language model: the reference's serial heads have 2. Its tensors would show it,
# after a download.
_MAX_LAYERS = 8


class DamagedFileError(UserOSError):
    """A file is there, and does not hold what a file of its name holds."""

    def __init__(self, file: str, name_or_path: Any, finding: str):
        super().__init__(
            f"`{file}` of {str(name_or_path)!r} is damaged: {finding}. An interrupted download or copy leaves such a "
            f"file. Delete it, and download it again (`force_download=True`) or save it again."
        )


@contextmanager
def damaged_json_named(file: str, name_or_path: Any) -> Iterator[None]:
    """Raises [`DamagedFileError`] where transformers reads, within this, a JSON file that holds no object."""
    try:
        yield
    except (AttributeError, TypeError) as error:  # it takes whatever JSON it finds for an object
        raise DamagedFileError(file, name_or_path, f"it holds no JSON object ({error})") from error
    except OSError as error:
        # It raises the same where there is no file.
        if not isinstance(error.__context__, (json.JSONDecodeError, UnicodeDecodeError)):
            raise
        raise DamagedFileError(file, name_or_path, f"it holds no JSON object ({error.__context__})") from error


def find_packaged_folder(name_or_path: Any) -> Path | None:
    """
    Returns the packaged folder with the `config.json` and `generation_config.json` of a released drafter.

    Args:
        name_or_path: A name on the Hub with its owner, the path of a copy whose folder is called like the repository,
            or that of a snapshot in a cache of the Hub.

    Returns:
        The folder, `None` where `name_or_path` is not the name of a released drafter.
    """
    parts = Path(os.path.abspath(name_or_path)).parts
    if len(parts) > 3 and parts[-2] == "snapshots":
        # `huggingface_hub` keeps its files under models--{owner}--{name}/snapshots/{commit}.
        owner, _, name = parts[-3].removeprefix("models--").partition("--")
    elif os.path.isdir(name_or_path):
        owner, name = _OWNER, parts[-1]
    else:
        owner, _, name = str(name_or_path).partition("/")
    if owner != _OWNER:
        return None
    return next((folder / name for folder in _FOLDERS if (folder / name / "config.json").is_file()), None)


def released_names() -> list[str]:
    """Returns the names on the Hub of the drafters whose configs are packaged."""
    return sorted(f"{_OWNER}/{path.parent.name}" for folder in _FOLDERS for path in folder.glob("*/config.json"))


def as_drafter_fields(fields: dict[str, Any], name_or_path: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """
    Returns the fields of a `GumihoConfig` that the content of a `config.json` stands for.

    Args:
        fields: What the file holds: a drafter's fields, those of a Llama, as the reference writes them, or those of an
            EAGLE head.
        name_or_path: Where it is from.
        options: The arguments of `from_pretrained`.

    Raises:
        ValueError: The file describes another kind of model.
    """
    model_type = fields.get("model_type", "gumiho" if "model" in fields else None)
    if model_type == "gumiho":
        return fields
    num_layers = fields.get("num_hidden_layers", LlamaConfig.num_hidden_layers)
    is_small = num_layers <= _MAX_LAYERS
    if is_small or claims_to_draft(fields):
        found = eagle_fields(fields, lambda: tensor_shapes(name_or_path, options), name_or_path)
        if found is not None:
            return found
    where = f"{str(name_or_path)!r} is not a Gumiho drafter"
    if model_type != LlamaConfig.model_type:
        raise UserValueError(
            f"{where}: its config.json has the model_type {model_type!r}. A drafter's is 'gumiho', 'llama' in the "
            f"layout of the reference implementation, or that of an EAGLE head."
        )
    if not is_small:
        raise UserValueError(
            f"{where}: its config.json describes a Llama of {num_layers} layers, where the serial head of a drafter "
            f"has 2 (at most {_MAX_LAYERS} are taken for one). Pass the name of a drafter, or its `GumihoConfig` as "
            f"`config`."
        )
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    return {"model_type": "gumiho", "gumiho_fc_bias": True, "model": fields, "dtype": dtype}


def is_of_drafter(fields: dict[str, Any], name_or_path: Any) -> bool:
    """
    Whether the content of a `config.json` is that of a drafter, of any method. A small language model has the same
    config as a serial head, and is told from it by the names of its tensors.
    """
    if fields.get("model_type", "gumiho" if "model" in fields else None) == "gumiho" or claims_to_draft(fields):
        return True
    num_layers = fields.get("num_hidden_layers", LlamaConfig.num_hidden_layers)
    return num_layers <= _MAX_LAYERS and "fc.weight" in tensor_shapes(name_or_path, {})


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


def stored_dtype(name_or_path: Any, options: Mapping[str, Any]) -> torch.dtype:
    """Returns the narrowest dtype that holds all floating-point tensors of a checkpoint to the bit."""
    dtypes: set[torch.dtype] = set()
    for file in weight_files(name_or_path, options):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                dtypes |= {tensors.get_tensor(key).dtype for key in tensors.keys()}  # noqa: SIM118 (not a dict)
        else:
            entries = _load_pickle(file, "meta").values()
            dtypes |= {entry.dtype for entry in entries if isinstance(entry, torch.Tensor)}
    return reduce(torch.promote_types, (dtype for dtype in dtypes if dtype.is_floating_point))


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
