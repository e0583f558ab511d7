"""
Draft trees for targets whose attention takes no tree mask: flash attention, flex attention, kernels from the Hub.

The prompt, and everything else in the process, runs as the target was loaded. A pass of this package over a tree, in
its own thread, runs `sdpa` with the tree's mask instead. Where a layer asks for what `sdpa` does not do (soft caps,
sinks), it runs the eager function of the layer's own model.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..internals import (
    attention_file,
    attention_function,
    attention_implementation,
    eager_attention,
    finds_registered_attention,
    replace_attention_function,
    supports_sdpa,
)


AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

# Attention implementations that take any float mask themselves.
MASKED_IMPLEMENTATIONS = ("eager", "sdpa")
# Options that `sdpa` ignores or refuses, whether or not an eager function names them.
_KNOWN_OPTIONS = {"softcap", "s_aux"}
# Options that the tree's mask takes care of.
_IN_THE_MASK = {"sliding_window"}
_MARK = "leaves_trees_to_masked_attention"

_passes = threading.local()


def tree_attention_obstacle(target: PreTrainedModel) -> str | None:
    """Returns why a target with another attention than the masked ones cannot verify trees; `None` where it can."""
    implementation = _implementation(target)
    if implementation in MASKED_IMPLEMENTATIONS:
        return None
    kinds = _attention_kinds(target)
    if not kinds:
        return "its code does not look attention functions up by their names"
    if not all(finds_registered_attention(kind, implementation) for kind in kinds):
        return "its code has a function of its own by that name"
    if any(eager_attention(kind) is None for kind in kinds):
        return "its code has no `eager_attention_forward` to fall back to"
    return None


def tree_attention(target: PreTrainedModel) -> Callable[[], AbstractContextManager[None]]:
    """
    Returns what makes a context manager for each pass of `target` over a tree: within it the layers of this thread's
    pass attend by the tree's mask, whatever implementation the target was loaded with.
    """
    implementation = _implementation(target)
    if implementation in MASKED_IMPLEMENTATIONS:
        return nullcontext
    function = attention_function(implementation)
    if not hasattr(function, _MARK):
        replace_attention_function(implementation, _dispatching(function))
    eager = {kind: eager_attention(kind) for kind in _attention_kinds(target)}
    return functools.partial(_masked_pass, eager, supports_sdpa(target))


@contextmanager
def _masked_pass(eager: dict[type, AttentionFunction], has_sdpa: bool) -> Iterator[None]:
    before = getattr(_passes, "eager", {}), getattr(_passes, "has_sdpa", True)
    _passes.eager, _passes.has_sdpa = eager, has_sdpa
    try:
        yield
    finally:
        _passes.eager, _passes.has_sdpa = before


def _dispatching(plain: AttentionFunction) -> AttentionFunction:
    @functools.wraps(plain)
    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        function, eager = plain, None
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4:
            eager = getattr(_passes, "eager", {}).get(type(module))
        if eager is not None:
            is_enough = _passes.has_sdpa and all(kwargs.get(name) is None for name in _beyond_sdpa(eager))
            function = attention_function("sdpa") if is_enough else eager
        return function(module, query, key, value, attention_mask, *args, **kwargs)

    setattr(attend, _MARK, True)
    return attend


@functools.cache
def _beyond_sdpa(eager: AttentionFunction) -> frozenset[str]:
    """Returns the options that an eager function honors, and `sdpa` does not."""
    parameters = set(inspect.signature(eager).parameters) - set(
        inspect.signature(attention_function("sdpa")).parameters
    )
    return frozenset(_KNOWN_OPTIONS | parameters - _IN_THE_MASK)


def _implementation(target: PreTrainedModel) -> str:
    return attention_implementation(target.config.get_text_config(decoder=True))


def _attention_kinds(target: PreTrainedModel) -> set[type]:
    """Returns the classes of the decoder's modules whose code may look up an attention function."""
    return {type(module) for module in target.get_decoder().modules() if attention_file(type(module)) is not None}
