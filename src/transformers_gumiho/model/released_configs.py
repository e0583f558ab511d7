"""The configs of the released drafters, and reading a drafter's config in every layout that there is."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from ..user_errors import UserValueError
from .eagle_configs import claims_to_draft, eagle_fields
from .weight_files import tensor_shapes


# In a wheel the configs are inside the package; a clone keeps them in its top-level folder.
_FOLDERS = (Path(__file__).parents[1] / "hub_configs", Path(__file__).parents[3] / "hub_configs")

# Of the released drafters, on the Hub.
_OWNER = "amd"

# A Llama of more layers is taken for a language model: the reference's serial heads have 2. Its tensors would show it,
# after a download.
_MOST_LAYERS = 8


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
    is_small = num_layers <= _MOST_LAYERS
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
            f"has 2 (at most {_MOST_LAYERS} are taken for one). Pass the name of a drafter, or its `GumihoConfig` as "
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
    return num_layers <= _MOST_LAYERS and "fc.weight" in tensor_shapes(name_or_path, {})
