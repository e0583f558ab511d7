"""Loading a checkpoint: its config in every layout, the names of its tensors, and what it must hold."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig
from transformers.utils import logging

from ..commands import UserValueError
from ..files import PLACES, damaged_files_named
from ..internals import WeightRenaming, register_checkpoint_conversion_mapping
from .block_configs import block_fields, is_block_drafter
from .checkpoint_files import plain_name, read_entry, tensor_files, tensor_shapes
from .draft_vocabulary import VOCABULARY_ENTRY, VOCABULARY_MASK, check_vocabulary_mask, entry_token_ids
from .eagle_configs import claims_to_draft, eagle_fields, is_of_language_model
from .mtp_layouts import may_have_mtp_layers, mtp_fields
from .published_head import PublishedHead, Shapes, num_layers


logger = logging.get_logger(__name__)

# In a wheel the configs are inside the package; a clone keeps them in its top-level folder.
_FOLDERS = (Path(__file__).parents[1] / "hub_configs", Path(__file__).parents[3] / "hub_configs")
_OWNER = "amd"  # of the released drafters, on the Hub
# A Llama of more layers is taken for a language model: the reference's serial heads have 2. Its tensors would show it,
# after a download.
_MAX_LAYERS = 8

_HEAD_TENSOR = re.compile(r"mlp\.(\d+)\.(\d+)\.linear\.(?:weight|bias)")
_TRANSITION_TENSOR = re.compile(r"transition\.(\d+)\.(?:down|up)")
_FUSION_TENSOR = "layer_fusion.weight"
_NUM_LISTED = 8  # tensors in an error


def find_packaged_folder(name_or_path: Any) -> Path | None:
    """
    Returns the packaged folder with the configs of a released drafter. It is found by its name on the Hub, the path of
    a copy whose folder is called like the repository, or that of a snapshot in a cache of the Hub; else `None`.
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
    Returns the fields of a `GumihoConfig` that the content of a `config.json` stands for: a drafter's fields, those of
    a Llama, as the reference writes them, those of a head of another method, or those of a target with MTP layers.
    `options` are the arguments of `from_pretrained`. Raises `ValueError` for another kind of model.
    """
    model_type = fields.get("model_type", "gumiho" if "model" in fields else None)
    if model_type == "gumiho":
        return fields
    if is_block_drafter(fields):
        return block_fields(fields, tensor_shapes(name_or_path, options), name_or_path)
    found = mtp_fields(fields, lambda: tensor_files(name_or_path, options), name_or_path)
    if found is not None:
        return found
    where = f"{str(name_or_path)!r} is not a Gumiho drafter"
    # The number of layers may have been copied from the target. The tensors of a folder are seen at once.
    if _is_small(fields) or claims_to_draft(fields) or os.path.isdir(name_or_path):
        shapes = cache(lambda: tensor_shapes(name_or_path, options))
        found = eagle_fields(fields, shapes, name_or_path)
        if found is not None:
            return found
        fields = _with_own_layers(fields, shapes(), name_or_path)
    if model_type != LlamaConfig.model_type:
        raise UserValueError(
            f"{where}: its config.json has the model_type {model_type!r}. A drafter's is 'gumiho', 'llama' in the "
            f"reference's layout, that of an EAGLE head, or that of a target with MTP layers in its checkpoint."
        )
    if not _is_small(fields):
        raise UserValueError(
            f"{where}: its config.json describes a Llama of {fields.get('num_hidden_layers')!r} layers, where the "
            f"serial head of a drafter has 2. Pass the name of a drafter, or its `GumihoConfig` as `config`."
        )
    if shapes() and is_of_language_model(shapes()):
        raise UserValueError(
            f"{where}: its tensors are a language model's. Give a drafter that was trained for your target. "
            f"Transformers' own assisted generation takes a language model as `assistant_model`."
        )
    return {
        "model_type": "gumiho",
        "gumiho_fc_bias": True,
        "model": fields,
        "dtype": fields.get("dtype", fields.get("torch_dtype")),
    }


def _with_own_layers(fields: dict[str, Any], shapes: Shapes, name_or_path: Any) -> dict[str, Any]:
    """Returns the fields of a Llama with the number of layers that a Gumiho drafter's tensors have."""
    own = {"num_hidden_layers": num_layers(shapes)}
    if "mlp.0.0.linear.weight" not in shapes or fields.get("num_hidden_layers") == num_layers(shapes):
        return fields
    PublishedHead(fields, "", name_or_path).warn_of_copies(own)
    return fields | own


def is_drafter(name: str | os.PathLike) -> bool:
    """
    Whether a folder or a name on the Hub is that of a drafter, by its config and the names of its tensors. Raises
    `ValueError` where no config can be read.
    """
    if find_packaged_folder(str(name)):
        return True
    try:
        with damaged_files_named(name):
            config, _ = PreTrainedConfig.get_config_dict(str(name))
            return is_of_drafter(config, name)
    except OSError as error:
        raise UserValueError(
            f"No drafter can be read from {str(name)!r} ({error}). Give a Gumiho drafter, or its folder or name."
        ) from error


def is_of_drafter(fields: dict[str, Any], name_or_path: Any) -> bool:
    """Whether the content of a `config.json` is that of a drafter, of any method."""
    model_type = fields.get("model_type", "gumiho" if "model" in fields else None)
    if model_type == "gumiho" or claims_to_draft(fields):
        return True
    # Some tensors of a target with MTP layers are called as a drafter's.
    if may_have_mtp_layers(fields):
        return False
    # The config of a small language model looks like that of a serial head. The names of the tensors tell them apart.
    return _is_small(fields) and not is_of_language_model(tensor_shapes(name_or_path, {}))


def misread_drafter(model: Any) -> str | None:
    """
    Returns the drafter from whose files a language model was loaded, without the tensors that only drafters have;
    `None` for any other model.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig) or may_have_mtp_layers(config.to_dict()):
        return None
    name = str(config.name_or_path)
    if not name or not _holds_drafter(name):
        return None
    is_language_model = is_of_language_model(map(plain_name, model.state_dict()))
    return name if is_language_model else None


@lru_cache
def _holds_drafter(name: str) -> bool:
    """Whether the weights of a folder, or of a name in the cache of the Hub, are a drafter's."""
    shapes = tensor_shapes(name, {"local_files_only": True})
    return bool(shapes) and not is_of_language_model(shapes)


def _is_small(fields: dict[str, Any]) -> bool:
    num_layers = fields.get("num_hidden_layers")
    return isinstance(num_layers, int) and num_layers <= _MAX_LAYERS


class RenamingOnLoad(WeightRenaming):
    """Reads a tensor under another name. What is saved keeps the drafter's own names, whatever was loaded."""

    __slots__ = ()

    def reverse_transform(self) -> WeightRenaming:
        """Returns a renaming that changes no name."""
        return WeightRenaming(source_patterns=r"(?!)", target_patterns="")


def register_released_names() -> None:
    """Registers with transformers the names under which a checkpoint may hold a drafter's tensors."""
    modules = (
        "embed_tokens|fc|fc_norm|hidden_norm|input_norm|layers|layer_fusion|lm_head|markov_head|mlp|norm|transition"
    )
    renamings = [
        # As in vLLM, around the drafter or the serial head alone.
        RenamingOnLoad(rf"^(?:model\.){{1,2}}(d2t$|(?:{modules})\.)", r"\1"),
        # The first layer of EAGLE-3, in most tools.
        RenamingOnLoad(r"^(?:model\.){0,2}midlayer\.", "layers.0."),
        # In Transformers' own DFlash head.
        RenamingOnLoad(r"^encoder\.fc\.", "fc."),
        RenamingOnLoad(r"^encoder\.output_norm_enc\.", "hidden_norm."),
        # As the reference's training writes them.
        RenamingOnLoad(r"^mlp\.mlp\.", "mlp."),
    ]
    register_checkpoint_conversion_mapping("gumiho", renamings, overwrite=True)


def accept_checkpoint(
    drafter: Any, info: dict[str, Any], source: Any, options: Mapping[str, Any], allow_mismatch: bool
) -> None:
    """
    Accepts or refuses the checkpoint of a drafter that `from_pretrained(source, **options)` has loaded, with its
    generation config.

    Args:
        info: The loading info, from which the keys go that are accepted.
        allow_mismatch: Whether tensors of the wrong shape are initialized.

    Raises:
        ValueError: The checkpoint lacks tensors, holds others or some of the wrong shape, or reads other layers than
            the config asks for; or its vocabulary does not fit the drafter.
    """
    name = repr(str(source))
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    _accept_new_fusion(drafter.config, missing, unexpected, source, options)
    _accept_new_heads(drafter, missing, source, options)
    _accept_transitions(drafter.config, missing, unexpected, name)
    _drop_extra_heads(drafter, unexpected, name)
    _adopt_vocabulary(drafter, unexpected, source, options)
    info |= {"missing_keys": missing, "unexpected_keys": unexpected}
    shapes = []
    if not allow_mismatch:
        for key, found, expected in info["mismatched_keys"]:
            shapes.append(f"{key} is {tuple(found)}, expected {tuple(expected)}")
    kinds = {"missing": missing, "unexpected": unexpected, "wrong shape": shapes}
    problems = [f"{kind}: {_listed(sorted(keys))}" for kind, keys in kinds.items() if keys]
    if not problems:
        return
    if "fc.weight" in missing and not drafter.config.is_mtp:
        reason = "is not a Gumiho drafter: it has no `fc`, which fuses a token with the state before it."
    else:
        reason = drafter.serial_head.misfit
    raise UserValueError(f"The checkpoint {name} {reason}\n" + "\n".join(problems))


def _listed(names: list[str]) -> str:
    """Returns some of the names, and how many there are besides."""
    others = len(names) - _NUM_LISTED
    return ", ".join(names[:_NUM_LISTED]) + (f" and {others} more" if others > 0 else "")


def _own_fields(config: Any, source: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a checkpoint's own config, whatever it is loaded with; none where it has no config."""
    if source is not None:
        places = {place: options[place] for place in (*PLACES, "variant") if place in options}
        with suppress(OSError, ValueError):  # it has none, and was loaded with another one
            fields, _ = type(config).get_config_dict(source, **places)
            return dict(fields)
    return {}


def _accept_new_heads(drafter: Any, missing: set[str], source: Any, options: Mapping[str, Any]) -> None:
    """Accepts a checkpoint without parallel heads, such as an EAGLE head, for a config with them."""
    new = {key for key in missing if _HEAD_TENSOR.fullmatch(key)}
    if not new or _own_fields(drafter.config, source, options).get("num_parallel_heads") != 0:
        return
    if options.get("generation_config") is None:
        # The settings for the depths of its own drafts do not fit.
        drafter.generation_config.update(tree_depth=None, draft_temperature=None, break_even=None)
    logger.warning(
        f"The checkpoint {str(source)!r} has no parallel heads. The {drafter.config.num_parallel_heads} of the config "
        f"are new. Train them (`--train_only parallel`)."
    )
    missing -= new


def _accept_new_fusion(
    config: Any, missing: set[str], unexpected: set[str], source: Any, options: Mapping[str, Any]
) -> None:
    """Accepts a checkpoint that reads one state of the target for a config with several layers."""
    name, layer_ids = repr(str(source)), config.target_layer_ids
    # Heads of other methods fuse layers by `fc`, whichever they are.
    if config.serial_head != "gumiho" or (layer_ids is None and _FUSION_TENSOR not in unexpected):
        return
    own_ids = _own_fields(config, source, options).get("target_layer_ids")
    if own_ids is not None and own_ids != layer_ids:
        raise UserValueError(
            f"The drafter {name} reads the target's layers {own_ids}, and cannot be loaded with "
            f"`target_layer_ids={layer_ids}`. Leave `target_layer_ids` out, or train a new drafter that reads those."
        )
    if _FUSION_TENSOR not in missing:
        return
    if own_ids is not None:
        raise UserValueError(
            f"The checkpoint {name} is damaged: it reads the target's layers {own_ids} (`target_layer_ids`), and its "
            f"weights lack `{_FUSION_TENSOR}`. Save or download it again."
        )
    logger.warning(
        f"The checkpoint {name} reads one state of the target. Its fusion with those of the layers {layer_ids} is "
        f"new: it begins as that of the highest one."
    )
    missing.remove(_FUSION_TENSOR)


def _accept_transitions(config: Any, missing: set[str], unexpected: set[str], name: str) -> None:
    """Accepts a checkpoint without transitions for a config with them, and surplus ones, which are left out."""
    num_used = config.num_parallel_heads if config.has_transitions else 0
    matches = [match for key in unexpected if (match := _TRANSITION_TENSOR.fullmatch(key))]
    surplus = {match[0] for match in matches if int(match[1]) >= num_used}
    if surplus and num_used == 0:
        logger.warning(f"The transitions of {name} are left out, as `transition_rank` is 0.")
    unexpected -= surplus
    new = {key for key in missing if _TRANSITION_TENSOR.fullmatch(key)}
    if len(new) == 2 * config.num_parallel_heads and config.has_transitions:
        logger.warning(
            f"The checkpoint {name} has no transitions. Those of rank {config.transition_rank} are new: they change "
            f"nothing until they are trained (`--train_only transition`)."
        )
        missing -= new


def _drop_extra_heads(drafter: Any, unexpected: set[str], name: str) -> None:
    """Accepts more parallel heads than the config asks for: the first are used. A `tree_depth` of all is lowered."""
    config, settings = drafter.config, drafter.generation_config
    found: dict[int, set[str]] = {}
    for key in unexpected:
        if (match := _HEAD_TENSOR.fullmatch(key)) and int(match[1]) >= config.num_parallel_heads:
            found.setdefault(int(match[1]), set()).add(key)
    # A weight and a bias in each block: tensors of an incomplete head stay unexpected.
    tensors_per_head = 2 * (config.num_residual_blocks + 1)
    surplus = [keys for keys in found.values() if len(keys) == tensors_per_head]
    if not surplus:
        return
    if settings.tree_depth is not None:
        settings.tree_depth = min(settings.tree_depth, config.max_draft_depth)
    logger.warning(
        f"The checkpoint {name} holds {config.num_parallel_heads + len(surplus)} parallel heads; the first "
        f"{config.num_parallel_heads} are used, as `num_parallel_heads` says."
    )
    unexpected.difference_update(*surplus)


def _adopt_vocabulary(drafter: Any, unexpected: set[str], source: Any, options: Mapping[str, Any]) -> None:
    """Makes the vocabulary that a checkpoint holds as a tensor the setting `draft_vocabulary`, unless that is set."""
    config, vocab_size = drafter.config, drafter.config.get_text_config().vocab_size
    if config.serial_head != "gumiho":  # it belongs to the weights
        if config.draft_vocab_size is not None:
            # As it was written: a buffer of another shape or type may hold anything.
            _read_vocabulary("d2t", vocab_size, source, options)
        return
    keys = sorted(key for key in unexpected if VOCABULARY_ENTRY.fullmatch(key))
    if len(keys) > 1:
        raise UserValueError(
            f"The checkpoint {str(source)!r} carries its draft vocabulary more than once: {', '.join(keys)}. Keep one "
            f"of them."
        )
    for key in keys:
        if drafter.generation_config.draft_vocabulary is None:
            if (token_ids := _read_vocabulary(key, vocab_size, source, options)) is None:
                return
            drafter.generation_config.draft_vocabulary = token_ids
        unexpected.remove(key)
        unexpected.difference_update([other for other in unexpected if VOCABULARY_MASK.fullmatch(other)])


def _read_vocabulary(key: str, vocab_size: int, source: Any, options: Mapping[str, Any]) -> list[int] | None:
    """Returns the token ids that an entry of a checkpoint stands for; `None` where it is not found."""
    if (entry := read_entry(source, key, options)) is None:
        return None
    token_ids = entry_token_ids(key, entry, vocab_size, source)
    if (mask := read_entry(source, "t2d", options)) is not None:
        check_vocabulary_mask(mask, token_ids, source)
    return token_ids
