"""Moves the entries of a prompt from the caller's cache to one that holds draft trees."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from .rollback import STATE_LAYERS
from .target_memory import StaticMemory
from .tree_cache import MOVED_BYTES, MOVED_SHARE, Span, TreeCache, TreeCacheLayer
from .tree_states import TreeStates


def take_over(
    cache: DynamicCache,
    capacity: int,
    context_mask: torch.Tensor | None = None,
    memory: StaticMemory | None = None,
    length: int | None = None,
    can_rewind: bool = False,
    num_nodes: int | None = None,
) -> TreeCache:
    """
    Moves the entries of a cache, after a prefill, to a [`TreeCache`] of this `capacity` and `memory`, whose `restore`
    moves them back, also if an error ends the move. All of its layers are `CONVERTIBLE_LAYERS` or `STATE_LAYERS`.

    Args:
        context_mask: As for [`TreeCache.hide`].
        length: Entries of the prompt; by default the cache counts them, which one of states alone cannot.
        can_rewind: Whether [`TreeCache.truncate`] may be called with states, which takes a copy of them.
        num_nodes: Nodes of a pass in shapes that grow: sliding layers then hold their window and a pass alone.
    """
    length = cache.get_seq_length() if length is None else length
    # 1. A cache of as many rows and layers. States stay where they are.
    has_states = any(isinstance(layer, STATE_LAYERS) for layer in cache.layers)
    states = TreeStates(cache.layers, memory, can_rewind) if has_states else None
    # Layers that read the keys and values of another one have none of their own, nor have those of states alone.
    filled = [index for index, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None]
    num_rows = cache.layers[filled[0]].keys.shape[0] if states is None else states.num_rows
    tree_cache = TreeCache(num_rows, max(capacity, length), memory)
    tree_cache.states, tree_cache.prompt_length = states, length
    tree_cache.layers = [TreeCacheLayer(tree_cache.spans[None]) for _ in cache.layers]
    tree_cache.commit([length] * num_rows)
    pairs = [(tree_cache.layers[index], cache.layers[index]) for index in filled]
    # 2. What layers with a window hold. States go back to the prompt, whose window is then needed.
    if num_nodes is not None and states is None:
        _hold_windows(tree_cache, pairs, length, num_nodes)
    # 3. The entries, of a few layers at a time: above all memory may run out, as the cache exists twice in part.
    try:
        _move_entries(tree_cache, pairs, length)
    except BaseException:
        tree_cache.restore(cache)
        raise
    tree_cache.hide(context_mask)
    return tree_cache


def _hold_windows(tree_cache: TreeCache, pairs: Sequence[tuple[Any, Any]], length: int, num_nodes: int) -> None:
    """Makes sliding layers hold their window alone, unless they record the past for the caller."""
    for new, old in pairs:
        if isinstance(old, DynamicSlidingWindowLayer) and not old.record_past:
            window, num_held = old.sliding_window, old.keys.shape[2]
            span = new.span = tree_cache.spans.setdefault(window, Span(window, 0, length))
            # Of layers with one window, the one that holds the most.
            span.first = min(span.first, length - num_held)
            # With room for further tokens, so that entries are seldom dropped.
            span.size = min(length - span.first + num_nodes + window // 2, tree_cache.capacity - span.first)


def _move_entries(tree_cache: TreeCache, pairs: Sequence[tuple[Any, Any]], length: int) -> None:
    # Outgrown buffers are copied with their free slots.
    num_bytes = sum(
        (old.keys.nbytes + old.values.nbytes) * new.span.size // max(old.keys.shape[2], 1) for new, old in pairs
    )
    at_once = max(int(len(pairs) * max(MOVED_SHARE, MOVED_BYTES / max(num_bytes, 1))), 1)
    for start in range(0, len(pairs), at_once):
        moved = pairs[start : start + at_once]
        tree_cache.allocate([(new, old.keys, old.values) for new, old in moved])
        for new, old in moved:
            new.first_slot = length - old.keys.shape[2]
            slots = slice(new.first_slot - new.span.first, length - new.span.first)
            new.keys[:, :, slots], new.values[:, :, slots] = old.keys, old.values
            old.keys = old.values = None
