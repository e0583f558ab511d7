"""
The names of tensors in released checkpoints, and what a checkpoint must hold to be loaded.

Functions here take from the keys that `from_pretrained` reports those that are accepted: `unexpected_keys` are entries
of the checkpoint without a place in the model, `missing_keys` entries of the model that the checkpoint lacks.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from ..internals import WeightRenaming, register_checkpoint_conversion_mapping
from ..user_errors import UserValueError
from .checkpoint_files import PLACES, plain_name, read_entry
from .configuration_gumiho import GumihoConfig
from .decoding_settings import vocabulary_fault


logger = logging.get_logger(__name__)

_HEAD_TENSOR = re.compile(r"mlp\.(\d+)\.(\d+)\.linear\.(?:weight|bias)")
_FUSION_TENSOR = "layer_fusion.weight"
# Draft vocabularies in checkpoints of EAGLE drafters: token ids, or their distances from the draft's own indices. The
# latter may come with a mask, `_MEMBERSHIP`.
_TOKEN_MAP, _OFFSETS, _MEMBERSHIP = "token_map", "d2t", "t2d"
_TRANSITION_TENSOR = re.compile(r"transition\.(\d+)\.(?:down|up)")


class RenamingOnLoad(WeightRenaming):
    """Reads a tensor under another name. What is saved keeps the drafter's own names, whatever was loaded."""

    __slots__ = ()

    def reverse_transform(self) -> WeightRenaming:
        """Returns a renaming that changes no name."""
        return WeightRenaming(source_patterns=r"(?!)", target_patterns="")


def register_released_names() -> None:
    """Registers with transformers the names under which a checkpoint may hold a drafter's tensors."""
    register_checkpoint_conversion_mapping(
        GumihoConfig.model_type,
        [
            # As in vLLM, around the drafter or the serial head alone.
            RenamingOnLoad(
                r"^(?:model\.){1,2}(d2t$|(?:embed_tokens|fc|fc_norm|input_norm|layers|layer_fusion|lm_head|mlp|norm"
                r"|transition)\.)",
                r"\1",
            ),
            # The first layer of EAGLE-3, in most tools.
            RenamingOnLoad(r"^(?:model\.){0,2}midlayer\.", "layers.0."),
            # As the reference's training writes them.
            RenamingOnLoad(r"^mlp\.mlp\.", "mlp."),
        ],
        overwrite=True,
    )


def drop_extra_heads(
    unexpected_keys: Iterable[str], config: GumihoConfig, generation_config: GenerationConfig, name_or_path: Any
) -> set[str]:
    """
    Accepts a checkpoint with more parallel heads than the config asks for: the first ones are used, and a `tree_depth`
    of `generation_config` that needs all of them is lowered. Returns the keys that are still unexpected.
    """
    unexpected = set(unexpected_keys)
    found: dict[int, set[str]] = {}
    for key in unexpected:
        if (match := _HEAD_TENSOR.fullmatch(key)) and int(match[1]) >= config.num_parallel_heads:
            found.setdefault(int(match[1]), set()).add(key)
    # A weight and a bias in each block: tensors of an incomplete head stay unexpected.
    tensors_per_head = 2 * (config.num_residual_blocks + 1)
    surplus = [keys for keys in found.values() if len(keys) == tensors_per_head]
    if not surplus:
        return unexpected
    if generation_config.tree_depth is not None:
        generation_config.tree_depth = min(generation_config.tree_depth, config.max_draft_depth)
    logger.warning(
        f"The checkpoint {str(name_or_path)!r} holds {config.num_parallel_heads + len(surplus)} parallel heads; the "
        f"first {config.num_parallel_heads} are used, as `num_parallel_heads` says. Drafts are at most "
        f"{config.max_draft_depth} tokens long."
    )
    return unexpected.difference(*surplus)


def accept_new_heads(
    drafter: Any, missing_keys: Iterable[str], name_or_path: Any, kwargs: Mapping[str, Any]
) -> set[str]:
    """
    Accepts a checkpoint without parallel heads, such as an EAGLE head, for a config with them: they are new, and
    settings for the depths of its drafts are removed. `kwargs` are the arguments of `from_pretrained`. Returns the
    keys that are still missing.
    """
    missing, config = set(missing_keys), drafter.config
    new = {key for key in missing if _HEAD_TENSOR.fullmatch(key)}
    if not new or _own_fields(name_or_path, kwargs).get("num_parallel_heads") != 0:
        return missing
    drafter.generation_config.update(tree_depth=None, draft_temperature=None, break_even=None)
    logger.warning(
        f"The checkpoint {str(name_or_path)!r} has no parallel heads. The {config.num_parallel_heads} that its config "
        f"asks for are new: they draft nothing of use until they are trained (`--train_only parallel`)."
    )
    return missing - new


def accept_transitions(
    unexpected_keys: Iterable[str], missing_keys: Iterable[str], config: GumihoConfig, name_or_path: Any
) -> tuple[set[str], set[str]]:
    """
    Accepts a checkpoint without transitions for a config with them: they are new, and change nothing until they are
    trained. Accepts one with transitions for a config without them, or for fewer heads: they are left out. Returns
    the keys that are still unexpected, and those still missing.
    """
    unexpected, missing = set(unexpected_keys), set(missing_keys)
    surplus = {
        key
        for key in unexpected
        if (match := _TRANSITION_TENSOR.fullmatch(key))
        and (not config.has_transitions or int(match[1]) >= config.num_parallel_heads)
    }
    if surplus and not config.has_transitions:
        logger.warning(f"The transitions of {str(name_or_path)!r} are left out, as `transition_rank` is 0.")
    new = {key for key in missing if _TRANSITION_TENSOR.fullmatch(key)}
    if len(new) == 2 * config.num_parallel_heads and config.has_transitions:
        logger.warning(
            f"The checkpoint {str(name_or_path)!r} has no transitions. Those of rank {config.transition_rank}, as its "
            f"config asks for, are new: they change nothing until they are trained (`--train_only transition`)."
        )
        missing -= new
    return unexpected - surplus, missing


def accept_new_fusion(
    info: Mapping[str, Any], config: GumihoConfig, name_or_path: Any, kwargs: Mapping[str, Any]
) -> set[str]:
    """
    Accepts a checkpoint that reads one state of the target for a config with several layers: their fusion begins as
    the state of the highest of them. `kwargs` are the arguments of `from_pretrained`. Returns the keys that are still
    missing.

    Raises:
        ValueError: The checkpoint reads other layers, or lacks the fusion that its own config names.
    """
    missing, layer_ids = set(info["missing_keys"]), config.target_layer_ids
    if config.is_eagle3:  # it fuses layers by `fc`, whichever they are
        return missing
    if layer_ids is None and _FUSION_TENSOR not in info["unexpected_keys"]:
        return missing
    own_ids = _own_fields(name_or_path, kwargs).get("target_layer_ids")
    if own_ids is not None and own_ids != layer_ids:
        raise UserValueError(
            f"The drafter {str(name_or_path)!r} was trained to read the target's layers {own_ids}, and cannot be "
            f"loaded with `target_layer_ids={layer_ids}`. Leave `target_layer_ids` out, or train a new drafter that "
            f"reads those."
        )
    if _FUSION_TENSOR not in missing:
        return missing
    if own_ids is not None:
        raise UserValueError(
            f"The checkpoint {str(name_or_path)!r} is damaged: its config says that it reads the target's layers "
            f"{own_ids} (`target_layer_ids`), and its weights lack `{_FUSION_TENSOR}`. Save or download it again."
        )
    logger.warning(
        f"The checkpoint {str(name_or_path)!r} reads one state of the target. Its fusion with those of the layers "
        f"{layer_ids}, as its config asks for, is new: it begins as that of the highest one."
    )
    return missing - {_FUSION_TENSOR}


def _own_fields(name_or_path: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a checkpoint's own config, whatever it is loaded with; none where it has no config."""
    if name_or_path is None:
        return {}
    where = {name: kwargs[name] for name in PLACES if name in kwargs}
    try:
        fields, _ = GumihoConfig.get_config_dict(name_or_path, **where)
    except (OSError, ValueError):  # it has none, and was loaded with another one
        return {}
    return fields


def check_fit(info: Mapping[str, Any], name_or_path: Any, allow_mismatch: bool) -> None:
    """
    Refuses a checkpoint that does not fit the drafter; `info` is the loading info of `from_pretrained`.

    Raises:
        ValueError: It lacks tensors, holds others, or, unless `allow_mismatch`, holds some of the wrong shape.
    """
    mismatched = [] if allow_mismatch else info["mismatched_keys"]
    shapes = [f"{name} is {tuple(found)}, expected {tuple(expected)}" for name, found, expected in mismatched]
    found = (("missing", info["missing_keys"]), ("unexpected", info["unexpected_keys"]), ("wrong shape", shapes))
    problems = [f"{kind}: {', '.join(sorted(names))}" for kind, names in found if names]
    if not problems:
        return
    if "fc.weight" in info["missing_keys"]:
        reason = "is not a Gumiho drafter: it has no `fc`, which fuses a token with the state before it."
    else:
        reason = "does not fit its GumihoConfig. Check that it is a Gumiho drafter and that its config belongs to it."
    raise UserValueError(f"The checkpoint {str(name_or_path)!r} {reason}\n" + "\n".join(problems))


def adopt_released_vocabulary(
    drafter: Any, unexpected_keys: Iterable[str], name_or_path: Any, options: Mapping[str, Any]
) -> set[str]:
    """
    Sets the `draft_vocabulary` of a drafter to the vocabulary that its checkpoint holds as a tensor, unless it is set.
    That of an EAGLE-3 head belongs to its weights. `options` are the arguments of `from_pretrained`. Returns the keys
    that are still unexpected.

    Raises:
        ValueError: The checkpoint carries several vocabularies, or one that does not fit the drafter.
    """
    unexpected = set(unexpected_keys)
    generation_config, vocab_size = drafter.generation_config, drafter.config.get_text_config().vocab_size
    if drafter.config.is_eagle3:
        return unexpected
    keys = sorted(key for key in unexpected if is_vocabulary_entry(key))
    if not keys:
        return unexpected
    key, *others = keys
    if others:
        raise UserValueError(
            f"The checkpoint {str(name_or_path)!r} carries its draft vocabulary more than once: {', '.join(keys)}. "
            f"Keep one of them."
        )
    if generation_config.draft_vocabulary is None:
        entry = read_entry(name_or_path, key, options)
        if entry is None:
            return unexpected
        generation_config.draft_vocabulary = entry_token_ids(key, entry, vocab_size, name_or_path)
    redundant = {other for other in unexpected if is_vocabulary_mask(other)}
    return unexpected - {key} - (redundant if plain_name(key) == _OFFSETS else set())


def is_vocabulary_entry(key: str) -> bool:
    """Returns whether a checkpoint's entry of this name is a draft vocabulary."""
    return plain_name(key) in (_TOKEN_MAP, _OFFSETS)


def is_vocabulary_mask(key: str) -> bool:
    """Returns whether a checkpoint's entry of this name is a draft vocabulary once more, as a mask."""
    return plain_name(key) == _MEMBERSHIP


def entry_token_ids(key: str, entry: Any, vocab_size: int, name_or_path: Any) -> list[int]:
    """
    Returns the token ids that a checkpoint's entry stands for.

    Raises:
        ValueError: It does not name distinct token ids of the vocabulary.
    """
    values, where = torch.as_tensor(entry), f"In the checkpoint {str(name_or_path)!r}, `{key}`"
    if values.ndim != 1 or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise UserValueError(
            f"{where} must be 1-D and of integers, got {values.dtype} of shape {tuple(values.shape)}. Correct it, or "
            f"take it out to draft from all of the vocabulary."
        )
    values = values.long()
    if plain_name(key) == _OFFSETS:
        values = values + torch.arange(len(values), device=values.device)
    token_ids = values.tolist()
    if fault := vocabulary_fault(token_ids, vocab_size):
        raise UserValueError(
            f"{where} must name distinct token ids from 0 to {vocab_size - 1}, but {fault}. Correct it, or take it "
            f"out to draft from all of the vocabulary."
        )
    return token_ids
