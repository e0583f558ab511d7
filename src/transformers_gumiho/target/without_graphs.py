"""Targets that you have compiled: passes over drafts run copies of the modules around what the drafter reads."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..internals import has_own_forward, is_compiled, uncompiled, uncompiled_copy
from .feature_reader import find_decoder, find_layers


def without_graphs(target: PreTrainedModel, layer_ids: Sequence[int] | None) -> Any:
    """
    Returns the target, or for one with compiled modules a copy that shares its weights. In the copy no module is
    compiled that the drafter reads, or that holds such a module: a graph takes no notice of hooks that are registered
    later, and a thread that compiles fails where they come and go. All other modules stay compiled.

    Args:
        target: The target.
        layer_ids: The `target_layer_ids` of the drafter.
    """
    if not any(map(is_compiled, target.modules())):
        return target
    layers = {} if layer_ids is None else find_layers(target, layer_ids)
    return _copied(target, {find_decoder(target), *layers.values()})


def _copied(module: nn.Module, read: set[nn.Module]) -> nn.Module:
    """Copies the module and those below it that are `read`, or hold one that is."""
    module = uncompiled(module)
    around = {child for child in module.children() if not read.isdisjoint(child.modules())}
    if has_own_forward(module):
        around = set()  # accelerate's, which runs the submodules that it was made for
    return uncompiled_copy(module, {child: _copied(child, read) for child in around})
