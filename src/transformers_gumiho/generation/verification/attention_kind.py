"""Which attention the layers of a target compute, and what masks it takes in passes over draft trees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...internals import (
    EAGER_MASK,
    PADDING_MASKS,
    SDPA_ATTENTION,
    SDPA_MASK,
    UNMASKED_ATTENTION,
    UNMASKED_IMPLEMENTATIONS,
    attention_implementation,
    mask_function,
    modules_of,
    registered_attention,
)
from .attention import attention_file, eager_attention, replaced_attention


# Attention implementations that take any float mask.
MASKED_IMPLEMENTATIONS = ("eager", "sdpa")


@dataclass(frozen=True)
class AttentionKind:
    """
    The attention of a target's layers.

    Attributes:
        name: Name of its implementation.
        omits_masks: Whether it also takes `None` for a mask that would hide nothing.
        is_replaced: Whether passes over trees run `sdpa` or eager attention instead, which compute the same.
        registered: The functions for attention and its masks, if one of them is not transformers' own.
        refusal: Why no drafts can be verified with it, as a clause that follows its name, if so.
        tree_obstacle: Why it cannot verify trees, as a clause that follows the target's name, if so.
    """

    name: str
    omits_masks: bool = False
    is_replaced: bool = False
    registered: tuple[Any, ...] = ()
    refusal: str | None = None
    tree_obstacle: str | None = None


def attention_kind(model: PreTrainedModel, config: PreTrainedConfig, has_windows: bool = False) -> AttentionKind:
    """Returns the attention of a model's layers, whose decoder has this `config`, as they look it up."""
    name = attention_implementation(config)
    modules = modules_of(model.get_decoder())
    kinds = attention_classes(modules)
    found = _functions_of_layers(modules, kinds)
    if len(found) > 1:
        names = ", ".join(sorted({repr(name) for name, _ in found}))
        return AttentionKind(name, tree_obstacle=f"has layers with different attention functions ({names})")
    if not found:
        refusal = None if name in MASKED_IMPLEMENTATIONS else "its code does not look up attention functions by name"
        return AttentionKind(name, omits_masks=name == "sdpa", refusal=refusal)
    (((name, _), function),) = found.items()
    make_mask, original = mask_function(name), replaced_attention(function)
    if name == "eager" and function is None and make_mask is EAGER_MASK:
        return AttentionKind(name)
    if name == "sdpa" and original is SDPA_ATTENTION and make_mask is SDPA_MASK:
        return AttentionKind(name, omits_masks=True)
    if original in UNMASKED_ATTENTION and make_mask in PADDING_MASKS:
        return AttentionKind(name, is_replaced=True, refusal=_fallback_obstacle(kinds, name))
    if name.startswith(UNMASKED_IMPLEMENTATIONS):
        return AttentionKind(name, refusal="another program has put a function of its own in its place")
    # Plain decoding lets a window end with the cache, which holds more while drafts are verified.
    refusal = None
    if make_mask is None and has_windows:
        refusal = "it has no mask function, so a window of this target would be cut by its cache alone"
    obstacle = f"has the attention {name!r}, which is not transformers' own"
    return AttentionKind(name, registered=(function, make_mask), refusal=refusal, tree_obstacle=obstacle)


def attention_classes(modules: Sequence[nn.Module]) -> set[type]:
    """Returns the classes of a decoder's modules whose code may look up an attention function."""
    return {kind for kind in set(map(type, modules)) if attention_file(kind) is not None}


def _functions_of_layers(modules: Sequence[nn.Module], kinds: set[type]) -> dict[tuple[str, int], Any]:
    """Returns the functions that layers of these kinds look up, by the implementation's name and the function's id."""
    configs = ((type(module), getattr(module, "config", None)) for module in modules if type(module) in kinds)
    # Layers share configs, and reading one takes long.
    distinct = {(kind, id(config)): config for kind, config in configs if isinstance(config, PreTrainedConfig)}
    names = {(kind, attention_implementation(config)) for (kind, _), config in distinct.items()}
    found = [(name, _function_of_layers(kind, name)) for kind, name in names if name]
    return {(name, id(function)): function for name, function in found}


def _function_of_layers(kind: type, name: str) -> Any:
    """Returns the function that layers of a class look up by this name; `None` for `eager` if none is registered."""
    # An entry of the object that they ask goes before a registered function.
    return attention_file(kind).ALL_ATTENTION_FUNCTIONS.get(name)


def _fallback_obstacle(kinds: set[type], name: str) -> str | None:
    # An entry of the object that layers ask would hide the function that is registered for these passes.
    if any(_function_of_layers(kind, name) is not registered_attention(name) for kind in kinds):
        return "its code has a function of its own by that name"
    if any(eager_attention(kind) is None for kind in kinds):
        return "its code has no `eager_attention_forward` to fall back to"
    return None
