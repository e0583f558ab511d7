"""Compiled targets: passes over drafts run uncompiled copies of the modules that the drafter reads."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..internals import has_own_forward, is_compiled, uncompiled, uncompiled_copy
from ..model.target_layers import TargetLayers
from .feature_reader import find_decoder, find_layers


def without_graphs(target: PreTrainedModel, layers: TargetLayers | None) -> Any:
    """
    Returns the target, or for one with compiled modules a copy that shares its weights. In the copy, the modules that
    the drafter reads, and those around them, are not compiled: a graph ignores hooks that are registered later, and a
    compiling thread fails where hooks come and go. All other modules stay compiled. `layers` are those that
    the drafter reads.
    """
    if not any(map(is_compiled, target.modules())):
        return target
    read = {} if layers is None else find_layers(target, layers)
    return _copied(target, {find_decoder(target), *read.values()})


def _copied(module: nn.Module, read: set[nn.Module]) -> nn.Module:
    """Copies the module and its submodules that are `read`, or hold one that is."""
    module = uncompiled(module)
    around = {child for child in module.children() if not read.isdisjoint(child.modules())}
    if has_own_forward(module):
        around = set()  # accelerate's, which runs the submodules that it was made for
    return uncompiled_copy(module, {child: _copied(child, read) for child in around})
