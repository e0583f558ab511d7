"""Which attention the layers of a target compute, and what masks it takes in passes over draft trees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...internals import (
    SDPA_ATTENTION,
    UNMASKED_ATTENTION,
    attention_file,
    attention_implementation,
    attention_of_layers,
    eager_attention,
    is_unmasked_implementation,
    masks_for_attention,
    modules_of,
    registered_attention,
)
from .attention import replaced_attention


# Attention implementations that take any float mask.
MASKED_IMPLEMENTATIONS = ("eager", "sdpa")


@dataclass(frozen=True)
class AttentionKind:
    """
    The attention of a target's layers.

    Attributes:
        name: Name of its implementation.
        masks: The masks that it takes: "added" to the scores, or "boolean" ones, true at seen slots.
        omits_masks: Whether it also takes `None` for a mask that would hide nothing.
        sees_padding: Whether plain decoding gives it no mask, so that it also attends to padding.
        is_replaced: Whether passes over trees run `sdpa` or eager attention instead, which compute the same.
        registered: The function, if a user has registered it.
        refusal: Why no drafts can be verified with it, as a clause that follows its name, if so.
        tree_obstacle: Why it cannot verify trees, as a clause that follows the target's name, if so.
    """

    name: str
    masks: Literal["added", "boolean"] = "added"
    omits_masks: bool = False
    sees_padding: bool = False
    is_replaced: bool = False
    registered: Callable[..., Any] | None = None
    refusal: str | None = None
    tree_obstacle: str | None = None

    def mask_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of its masks for scores of this dtype."""
        return torch.bool if self.masks == "boolean" else dtype


def attention_kind(model: PreTrainedModel, config: PreTrainedConfig, has_windows: bool = False) -> AttentionKind:
    """
    Returns the attention of a model's layers, as they look it up. `config` is that of the model's decoder;
    `has_windows`: whether layers attend to a window.
    """
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
    masks = masks_for_attention(name)
    original = replaced_attention(function)
    if name == "eager" and function is None and masks == "added":
        return AttentionKind(name)
    if name == "sdpa" and original is SDPA_ATTENTION and masks == "boolean":
        return AttentionKind(name, omits_masks=True)  # it takes masks of both kinds
    if original in UNMASKED_ATTENTION and masks == "padding":
        return AttentionKind(name, is_replaced=True, refusal=_fallback_obstacle(kinds, name))
    if is_unmasked_implementation(name):
        return AttentionKind(name, refusal="another program has put a function of its own in its place")
    return _registered_kind(name, function, masks, has_windows)


def attention_classes(modules: Sequence[nn.Module]) -> set[type]:
    """Returns the classes of a decoder's modules whose code may look up an attention function."""
    return {kind for kind in set(map(type, modules)) if attention_file(kind) is not None}


def _functions_of_layers(modules: Sequence[nn.Module], kinds: set[type]) -> dict[tuple[str, int], Any]:
    """Returns the functions that layers of these kinds look up, by the implementation's name and the function's id."""
    configs = ((type(module), getattr(module, "config", None)) for module in modules if type(module) in kinds)
    # Layers share configs, and reading one takes long.
    distinct = {(kind, id(config)): config for kind, config in configs if isinstance(config, PreTrainedConfig)}
    names = {(kind, attention_implementation(config)) for (kind, _), config in distinct.items()}
    found = [(name, attention_of_layers(kind, name)) for kind, name in names if name]
    return {(name, id(function)): function for name, function in found}


def _fallback_obstacle(kinds: set[type], name: str) -> str | None:
    # An entry of the object that layers ask would hide the function that is registered for these passes.
    if any(attention_of_layers(kind, name) is not registered_attention(name) for kind in kinds):
        return "its code has a function of its own by that name"
    if any(eager_attention(kind) is None for kind in kinds):
        return "its code has no `eager_attention_forward` to fall back to"
    return None


def _registered_kind(
    name: str, function: Callable[..., Any] | None, masks: str | None, has_windows: bool
) -> AttentionKind:
    """Returns the kind of a function that a user has registered. It computes in passes over drafts itself."""
    if masks == "boolean":
        return AttentionKind(name, "boolean", omits_masks=True, registered=function)
    if masks == "added":
        return AttentionKind(name, "added", registered=function)
    if masks is not None:
        obstacle = f"has the attention {name!r}, which takes masks of its own kind"
        return AttentionKind(name, registered=function, tree_obstacle=obstacle)
    # Plain decoding lets a window end with the cache, which holds more while drafts are verified.
    refusal = "it has no mask function, so a window of this target would be cut by its cache alone"
    kind = AttentionKind(name, "boolean", omits_masks=True, sees_padding=True, registered=function)
    return replace(kind, refusal=refusal) if has_windows else kind
