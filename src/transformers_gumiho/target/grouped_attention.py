"""
Attention of a pass over a draft tree to grouped keys and values, as they lie in the cache.

Where several query heads share a head of keys and values, transformers' `sdpa` function copies keys and values for
each of them as soon as there is a mask: in every layer, the whole context. Within a pass of this package, and in its
thread alone, the heads are read where they are. Whatever else goes on in the process, and every call that is not
plainly masked attention (dropout, sinks, soft caps, a bias of positions, paged caches), keeps transformers' function.

PyTorch tries cuDNN first for 16-bit attention on Hopper and Blackwell GPUs. cuDNN keeps a plan for each exact size,
and every cycle has new sizes. With `GUMIHO_AVOID_CUDNN=1` in the environment, passes of this package run the
memory-efficient kernel instead.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from ..internals import (
    attention_function,
    attention_reads_groups,
    can_attend_efficiently,
    cpu_attention_reads_groups,
    is_own_sdpa_attention,
    memory_efficient_attention,
    packs_single_queries,
    replace_attention_function,
)


AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

# What changes the outcome, next to the mask and the scale.
_OTHER_OPTIONS = ("dropout", "position_bias", "cache", "softcap", "s_aux", "output_attentions")

AVOID_CUDNN = "GUMIHO_AVOID_CUDNN"

# Kernels that take a mask read rows that begin at multiples of so many numbers; they copy others in each layer.
_ROW_ALIGNMENT = 16

# Within a pass of ours: the masks that were folded in it. `None` outside.
_passes = threading.local()


@contextmanager
def groups_in_place() -> Iterator[None]:
    """Within it this thread's passes read grouped keys and values where they are."""
    before = getattr(_passes, "folded_masks", None)
    _passes.folded_masks = {}
    # Read here: a compiled pass would not see it change.
    _passes.avoids_cudnn = os.environ.get(AVOID_CUDNN) == "1"
    try:
        yield
    finally:
        _passes.folded_masks = before


@contextmanager
def copying_groups() -> Iterator[None]:
    """Within it this thread's passes attend as if [`groups_in_place`] were not there: for comparison."""
    # A count, as what is entered first may be left first.
    _passes.num_copying = getattr(_passes, "num_copying", 0) + 1
    try:
        yield
    finally:
        _passes.num_copying -= 1


def install() -> None:
    """
    Puts a function in the place of transformers' `sdpa` that calls it, except within [`groups_in_place`]. Calling
    this again changes nothing, nor does it where somebody else has registered another function.
    """
    plain = attention_function("sdpa")
    if is_own_sdpa_attention(plain):
        replace_attention_function("sdpa", _dispatching(plain))


def _dispatching(plain: AttentionFunction) -> AttentionFunction:
    @functools.wraps(plain)
    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if (
            attention_mask is None
            or args
            or getattr(_passes, "folded_masks", None) is None
            or getattr(_passes, "num_copying", 0) > 0
            or not _is_plainly_masked(query, attention_mask, kwargs)
        ):
            return plain(module, query, key, value, attention_mask, *args, **kwargs)
        scaling = kwargs.get("scaling")
        if _passes.avoids_cudnn and can_attend_efficiently(query, key, value, attention_mask):
            output = attend_folded(query, key, value, attention_mask, scaling, memory_efficient_attention)
        elif not _would_copy(module, query, key, value, attention_mask):
            return plain(module, query, key, value, attention_mask, *args, **kwargs)
        elif query.device.type == "cpu":
            # The kernel of CPUs computes one head after the other, and reads those of a group from the same place.
            output = scaled_dot_product_attention(
                query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
            )
        else:
            output = attend_folded(query, key, value, attention_mask, scaling)
        return output.transpose(1, 2).contiguous(), None

    return attend


def _is_plainly_masked(query: torch.Tensor, mask: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether a mask that all heads share is all that there is to attention."""
    if mask.ndim != 4 or mask.shape[1] != 1:
        return False
    for name in _OTHER_OPTIONS:
        option = options.get(name)
        if option is not None and not (isinstance(option, (bool, float)) and not option):
            return False
    return True


def _would_copy(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> bool:
    """Whether transformers' function would copy keys and values for each query head, and that can be spared."""
    num_groups = getattr(module, "num_key_value_groups", 1)
    if num_groups == 1 or query.shape[1] != num_groups * key.shape[1] or attention_reads_groups(mask, key, value):
        return False
    if query.shape[2] == 1 and packs_single_queries():
        return False
    if query.device.type == "cpu":
        return cpu_attention_reads_groups(query, key, value)
    # Folding copies the mask instead, a row for each query of each group.
    return query.shape[2] < key.shape[1] * (key.shape[3] + value.shape[3])


def attend_folded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
    attention: Callable[..., torch.Tensor] = scaled_dot_product_attention,
) -> torch.Tensor:
    """
    Attends with the query heads of a group folded into the rows of one head.

    Elsewhere than on a CPU a mask and `enable_gqa` together are left to PyTorch's plain implementation, which copies
    and keeps all scores. With as many heads on both sides the fused kernels that take a mask take this one.

    Args:
        query (`(B, groups * kv_heads, n, head_dim)`): The queries.
        key (`(B, kv_heads, K, head_dim)`): The keys.
        value (`(B, kv_heads, K, value_dim)`): The values.
        mask (`(B, 1, n, K)`): Added to the scores, or false where a key is hidden.
        scaling: Of the scores.
        attention: What attends, with as many heads of queries as of keys.

    Returns:
        `(B, groups * kv_heads, n, value_dim)`.
    """
    batch_size, num_heads, num_queries, _ = query.shape
    num_groups = num_heads // key.shape[1]
    rows = query.reshape(batch_size, key.shape[1], num_groups * num_queries, -1)
    output = attention(rows, key, value, attn_mask=_folded_mask(mask, num_groups), scale=scaling)
    return output.reshape(batch_size, num_heads, num_queries, -1)


def _folded_mask(mask: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Returns `(B, 1, num_groups * n, K)`: a mask `(B, 1, n, K)` for folded rows, made once in a pass."""
    known = getattr(_passes, "folded_masks", None)
    if known is None or torch.compiler.is_compiling():  # which makes equal things once anyway
        return _fold(mask, num_groups)
    key = id(mask), num_groups
    if key not in known:
        known[key] = mask, _fold(mask, num_groups)  # with the mask, so that no other one gets its id
    folded: torch.Tensor = known[key][1]
    return folded


def _fold(mask: torch.Tensor, num_groups: int) -> torch.Tensor:
    num_keys = mask.shape[-1]
    repeated = mask.expand(-1, num_groups, -1, -1).reshape(mask.shape[0], 1, -1, num_keys)
    return nn.functional.pad(repeated, (0, -num_keys % _ROW_ALIGNMENT))[..., :num_keys]
