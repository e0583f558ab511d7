"""Moving the entries of an ordinary cache to the buffers of a cache for draft trees, and back."""

from collections.abc import Sequence
from typing import Any

from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .cache_buffers import MOVED_BYTES, MOVED_SHARE, CacheBuffers


# The layers of an ordinary cache whose entries can be taken over. Releases of transformers that know a dummy layer put
# it where a layer reads the keys and values of another one; earlier ones leave such layers out.
CONVERTIBLE_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    *([cache_utils.DummyLayer] if hasattr(cache_utils, "DummyLayer") else []),
)


def is_convertible(cache: Any) -> bool:
    """Whether the entries of `cache` can be taken over."""
    return (
        isinstance(cache, DynamicCache)
        and not cache.offloading
        and all(type(layer) in CONVERTIBLE_LAYERS for layer in cache.layers)
    )


def move_from(cache: DynamicCache, layers: Sequence[Any], buffers: CacheBuffers) -> None:
    """
    Moves the entries of `cache` to new buffers of `layers`, a few layers at a time.

    A sliding layer of `cache` has dropped what lies before its window; those slots stay empty, as no later token sees
    them.
    """
    length = cache.get_seq_length()
    # Layers that read the keys and values of another one have none of their own.
    pairs = [(new, old) for new, old in zip(layers, cache.layers, strict=True) if old.keys is not None]
    # With the slots that are free: the buffers are copied, too, when they are outgrown.
    num_bytes = sum(old.keys.nbytes + old.values.nbytes for _, old in pairs) * buffers.capacity // max(length, 1)
    at_once = max(int(len(pairs) * max(MOVED_SHARE, MOVED_BYTES / max(num_bytes, 1))), 1)
    for first in range(0, len(pairs), at_once):
        moved = pairs[first : first + at_once]
        buffers.allocate([(new, old.keys, old.values) for new, old in moved])
        for new, old in moved:
            new.first_slot = length - old.keys.shape[2]
            new.keys[:, :, new.first_slot : length] = old.keys
            new.values[:, :, new.first_slot : length] = old.values
            old.keys = old.values = None


def move_to(cache: DynamicCache, layers: Sequence[Any], buffers: CacheBuffers, lengths: Sequence[int]) -> None:
    """
    Moves the first `lengths[b]` entries of each row to `cache`; shorter rows end in zeros.

    A sliding layer that records the past (`activate_past_recording`) also gets what it held before its window.
    """
    length = max(lengths)
    buffers.clear_behind(lengths)
    for old, new in zip(cache.layers, layers, strict=True):
        if not new.is_initialized:
            continue
        start = new.first_slot
        if isinstance(old, DynamicSlidingWindowLayer):
            old.cumulative_length = length
            if not old.record_past:
                start = max(length - old.sliding_window + 1, start)
        old.keys, old.values = new.keys[:, :, start:length], new.values[:, :, start:length]
        # A view keeps all of the buffer alive; where most of that is not in use, a copy costs less. Memory that the
        # next generation uses is none of the caller's.
        if buffers.memory is not None or buffers.capacity > 1.25 * (length - start):
            old.keys, old.values = old.keys.clone(), old.values.clone()
