"""
Attention of passes over draft trees. It differs from transformers' own only in the thread that runs such a pass.

Without copies: transformers' `sdpa` function copies keys and values that query heads share, if there is a mask. These
passes read them in place, except with further options (dropout, sinks, soft caps, a position bias, paged caches).

With a tree mask: flash and flex attention take no such mask. These passes run `sdpa` instead, or for options that it
lacks (soft caps, sinks), the eager function of the target's own code.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from ...internals import (
    CPU_ATTENTION_READS_GROUPS,
    PACKS_SINGLE_QUERIES,
    SDPA_ATTENTION,
    UNMASKED_ATTENTION,
    registered_attention,
    supports_sdpa,
    use_gqa_in_sdpa,
)


AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


# Options besides mask and scale that change the result.
_OTHER_OPTIONS = ("dropout", "position_bias", "cache", "softcap", "s_aux", "output_attentions")
# Options that `sdpa` ignores or refuses.
_KNOWN_OPTIONS = {"softcap", "s_aux"}
# Options that the tree's mask replaces.
_REPLACED_BY_MASK = {"sliding_window"}
# Kernels need the rows of a mask to begin at multiples of this many numbers. Other masks are copied in each layer.
_ROW_ALIGNMENT = 16
# Attribute of a function that was registered here: itself, as functions that wrap it copy the attribute; the function
# that it replaces; and the passes that it knows, which are those of one copy of this package.
_MARK = "gumiho_attention"

# State of a pass over a tree in this thread: its folded masks, the eager function of each class of layers, and others.
_passes = threading.local()


@contextmanager
def pass_state(**values: Any) -> Iterator[None]:
    """Returns a context for a pass, in which [`current_pass`] returns these values in this thread."""
    before = {name: current_pass(name) for name in values}
    vars(_passes).update(values)
    try:
        yield
    finally:
        vars(_passes).update(before)


def current_pass(name: str) -> Any:
    """Returns this value of the running pass, `None` outside of one."""
    return getattr(_passes, name, None)


@contextmanager
def gqa_without_copies() -> Iterator[None]:
    """Returns a context in which this thread's passes read grouped keys and values in place."""
    _install("sdpa", _kernel_without_copies)
    with pass_state(folded_masks={}):
        yield


def masked_attention(
    target: PreTrainedModel, implementation: str, kinds: Collection[type]
) -> Callable[[], AbstractContextManager[None]]:
    """
    Returns what makes a context for a pass of `target` over a tree, in which layers of these `kinds` use the tree's
    mask, though the `implementation` takes none.
    """
    _install(implementation, _kernel_that_takes_masks)
    eager = {kind: eager_attention(kind) for kind in kinds}
    return functools.partial(pass_state, eager=eager, has_sdpa=supports_sdpa(target))


def attention_file(kind: type) -> Any:
    """Returns the module that looks up attention functions for a class or a base of it, if any."""
    # Except the module that defines the functions.
    names = [base.__module__ for base in kind.__mro__ if base.__module__ != AttentionInterface.__module__]
    files = (sys.modules.get(name) for name in names)
    return next((file for file in files if hasattr(file, "ALL_ATTENTION_FUNCTIONS")), None)


def eager_attention(kind: type) -> Any:
    """Returns the function that layers of a class call with `eager` attention, if any."""
    return getattr(attention_file(kind), "eager_attention_forward", None)


def replaced_attention(function: Any) -> Any:
    """Returns the function that those of this package replace, or the function itself."""
    return _opened(function)[0]


def _opened(function: Any) -> tuple[Any, list[Any]]:
    """Returns the same, and the passes that the functions of each copy of this package know."""
    passes = []
    while (mark := getattr(function, _MARK, None)) is not None and mark[0] is function:
        _, function, known = mark
        passes.append(known)
    return function, passes


def _install(implementation: str, choose: Callable[..., AttentionFunction]) -> None:
    """Registers a function for an implementation, unless it is registered already or somebody else's stands there."""
    plain = registered_attention(implementation)
    original, passes = _opened(plain)
    is_known = original is SDPA_ATTENTION or original in UNMASKED_ATTENTION
    if not is_known or any(known is _passes for known in passes):
        return

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
        function = plain
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4:
            function = choose(plain, module, query, key, value, attention_mask, args, kwargs)
        return function(module, query, key, value, attention_mask, *args, **kwargs)

    setattr(attend, _MARK, (attend, plain, _passes))
    AttentionInterface.register(implementation, attend)


def _kernel_that_takes_masks(plain: AttentionFunction, module: nn.Module, *args: Any) -> AttentionFunction:
    eager = (current_pass("eager") or {}).get(type(module))
    if eager is None:
        return plain
    options = args[-1]
    needs_eager = any(options.get(name) is not None for name in _options_sdpa_lacks(eager))
    if needs_eager or not current_pass("has_sdpa"):
        return eager
    # Not what is registered as `sdpa`, which may be a function of the user's.
    return _kernel_without_copies(SDPA_ATTENTION, module, *args)


@functools.cache
def _options_sdpa_lacks(eager: AttentionFunction) -> frozenset[str]:
    """Returns the options that an eager function honors, and `sdpa` does not."""
    of_sdpa = set(inspect.signature(SDPA_ATTENTION).parameters)
    of_eager = set(inspect.signature(eager).parameters)
    return frozenset(_KNOWN_OPTIONS | (of_eager - of_sdpa - _REPLACED_BY_MASK))


def _kernel_without_copies(
    plain: AttentionFunction,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> AttentionFunction:
    if args or current_pass("folded_masks") is None or not _is_plainly_masked(mask, options):
        return plain
    return _attend_in_place if _would_copy(module, query, key, value, mask) else plain


def _attend_in_place(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if query.device.type == "cpu":
        # On CPUs the kernel computes one head after the other, and reads shared keys and values in place.
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    else:
        output = attend_folded(query, key, value, mask, scaling)
    return output.transpose(1, 2).contiguous(), None


def _is_plainly_masked(mask: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether attention has no other options than a mask that all heads share."""
    # A loop, because Dynamo cannot trace an assignment within a comprehension.
    for name in _OTHER_OPTIONS:
        option = options.get(name)
        if option is not None and not (isinstance(option, (bool, float)) and not option):
            return False
    return mask.shape[1] == 1


def _would_copy(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> bool:
    """Whether transformers' function would copy keys and values for each query head without need."""
    num_groups = getattr(module, "num_key_value_groups", 1)
    if num_groups == 1 or query.shape[1] != num_groups * key.shape[1] or use_gqa_in_sdpa(mask, key, value):
        return False
    if query.shape[2] == 1 and PACKS_SINGLE_QUERIES:
        return False
    if query.device.type == "cpu":
        return CPU_ATTENTION_READS_GROUPS and query.shape[3] == key.shape[3] == value.shape[3]
    # Folding copies the mask instead: one row for each query of each group.
    return query.shape[2] < key.shape[1] * (key.shape[3] + value.shape[3])


def attend_folded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None = None
) -> torch.Tensor:
    """
    Attends with the query heads of a group folded into the rows of one head, so that PyTorch's fused kernels apply.
    On other devices than a CPU, `enable_gqa` with a mask copies keys and values, and keeps all scores.

    Queries `(B, groups * kv_heads, n, head_dim)`, keys `(B, kv_heads, K, head_dim)`, and a mask `(B, 1, n, K)` that is
    added to the scores, or false where a key is hidden. Returns `(B, groups * kv_heads, n, value_dim)`.
    """
    batch_size, num_heads, num_queries, _ = query.shape
    num_groups = num_heads // key.shape[1]
    rows = query.reshape(batch_size, key.shape[1], num_groups * num_queries, -1)
    output = scaled_dot_product_attention(rows, key, value, attn_mask=_folded_mask(mask, num_groups), scale=scaling)
    return output.reshape(batch_size, num_heads, num_queries, -1)


def _folded_mask(mask: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Returns `(B, 1, num_groups * n, K)`: a mask `(B, 1, n, K)` for folded rows, made once in a pass."""
    known = current_pass("folded_masks")
    if known is None or torch.compiler.is_compiling():  # the compiler reuses equal results itself
        return _fold(mask, num_groups)
    key = id(mask), num_groups
    if key not in known:
        known[key] = mask, _fold(mask, num_groups)  # keeps the mask alive, so that its id stays unique
    folded: torch.Tensor = known[key][1]
    return folded


def _fold(mask: torch.Tensor, num_groups: int) -> torch.Tensor:
    num_keys = mask.shape[-1]
    repeated = mask.expand(-1, num_groups, -1, -1).reshape(mask.shape[0], 1, -1, num_keys)
    return nn.functional.pad(repeated, (0, -num_keys % _ROW_ALIGNMENT))[..., :num_keys]
