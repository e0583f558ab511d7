"""A key-value cache for draft trees: rows advance by different lengths, and accepted entries are kept in place."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..internals import mark_static_address
from ..tree.verification import AcceptedPath
from .cache_buffers import CacheBuffers
from .cache_moving import move_from, move_to
from .cache_slots import CacheSlots, FixedSlots, GrowingSlots
from .static_memory import StaticMemory
from .verification_cache import VerificationCache


class TreeCacheLayer(CacheLayerMixin):
    """
    One layer of a [`TreeCache`]: views of its buffers, `keys` and `values`, `(B, heads, capacity, head_dim)`. Slots
    before `first_slot` are empty.
    """

    is_sliding = False
    first_slot = 0

    def __init__(self, cache: "TreeCache"):
        super().__init__()
        # A weak reference, so that the buffers are freed with the cache and not by a garbage collection later.
        self._cache = weakref.ref(cache)

    @property
    def cache(self) -> "TreeCache":
        """The cache that this layer belongs to."""
        cache = self._cache()
        if cache is None:
            raise RuntimeError("This layer's TreeCache no longer exists.")
        return cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the buffers for states of these shapes, dtypes and devices."""
        self.cache.buffers.allocate([(self, key_states, value_states)])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.update(key_states, value_states, self.cache.layers.index(self))

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return -1

    # Abstract under this name in earlier releases of transformers.
    get_max_cache_shape = get_max_length


class TreeCache(Cache, VerificationCache):
    """
    A cache that holds every position of the context, each row at its own length, plus entries on probation.

    Args:
        batch_size (`int`): Number of rows, `B`.
        capacity (`int`): Slots to allocate per row. Grows in large steps where that does not suffice.
        memory (`StaticMemory`, *optional*): Where the keys and values are to lie, if a captured graph is to find them.

    Attributes:
        buffers (`CacheBuffers`): The keys and values.
        slots (`CacheSlots`): Which slots are committed, and where new entries go.
    """

    def __init__(self, batch_size: int, capacity: int, memory: StaticMemory | None = None):
        super().__init__(layers=[])
        self.layers: list[TreeCacheLayer]
        self.buffers = CacheBuffers(batch_size, capacity, memory)
        self.slots: CacheSlots = GrowingSlots(self.buffers, [0] * batch_size)

    @classmethod
    def from_dynamic(
        cls,
        cache: Any,
        capacity: int,
        context_mask: torch.Tensor | None = None,
        memory: StaticMemory | None = None,
    ) -> "TreeCache":
        """
        Moves the entries of an ordinary cache here. [`restore`] moves them back.

        Args:
            cache (`DynamicCache`): One that `is_convertible` accepts.
            capacity: Slots to allocate per row.
            context_mask (`(B, T)`, *optional*): Zero at entries that nobody sees (padding).
            memory: As in [`TreeCache`].
        """
        length = cache.get_seq_length()
        batch_size = next(layer.keys.shape[0] for layer in cache.layers if layer.keys is not None)
        tree_cache = cls(batch_size, max(capacity, length), memory)
        tree_cache.layers = [TreeCacheLayer(tree_cache) for _ in cache.layers]
        move_from(cache, tree_cache.layers, tree_cache.buffers)
        tree_cache.slots.set_lengths([length] * batch_size)
        tree_cache.hide(context_mask)
        return tree_cache

    @property
    def capacity(self) -> int:
        """Slots of each row."""
        return self.buffers.capacity

    @property
    def lengths(self) -> list[int]:
        """Committed slots of each row, as far as the host knows them."""
        return self.slots.lengths

    @property
    def argument(self) -> "TreeCache":
        """The cache itself."""
        return self

    def hide(self, context_mask: torch.Tensor | None) -> None:
        """Hides the entries where `context_mask` `(B, T)` is zero (padding) from all passes that follow."""
        self.slots.context_mask = context_mask.bool() if context_mask is not None else None

    def fix_shapes(self, device: torch.device) -> None:
        """
        Makes every later pass see all slots. The cache must have room for whatever follows: it grows no more.

        Args:
            device: Where the number of committed slots is kept.
        """
        self.slots = FixedSlots(self.slots, device)
        # A captured graph reads and writes these where they lie; without the mark it would copy them in every replay.
        for tensor in (tensor for layer in self.layers for tensor in (layer.keys, layer.values)):
            if tensor is not None:
                mark_static_address(tensor)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Writes new entries behind the committed and pending ones of each row, and returns those that the pass sees.
        What is written stays only if it is committed.
        """
        while len(self.layers) <= layer_idx:
            self.layers.append(TreeCacheLayer(self))
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        return self.slots.write(layer, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Returns the slots of the longest row; a tensor `()` where shapes are fixed."""
        return self.slots.sequence_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.slots.num_seen(query_length), 0

    def starts(self, device: torch.device) -> int | torch.Tensor:
        return self.slots.starts(device)

    def attention_mask(
        self, visible: torch.Tensor, depths: torch.Tensor, dtype: torch.dtype, window: int | None = None
    ) -> torch.Tensor:
        return self.slots.attention_mask(visible, depths, dtype, window)

    def hides_nothing(self, num_new: int, window: int | None = None) -> bool:
        return self.slots.hides_nothing(num_new, window)

    def add_pending(self, num_entries: int) -> None:
        """Makes the next pass write behind the newest `num_entries`, which stay uncommitted."""
        self.slots.num_pending += num_entries

    def drop_pending(self) -> None:
        """Gives up what is not committed: the next pass writes right behind the committed entries."""
        self.slots.num_pending = 0

    def advance(self, accepted_lengths: Any) -> None:
        """
        Makes the first `accepted_lengths[b]` of the newest entries of each row permanent: a list, or `(B,)` where
        shapes are fixed; then the host no longer knows their number.
        """
        self.slots.advance(accepted_lengths)

    def commit(self, path: AcceptedPath) -> None:
        self.slots.keep(path)

    def truncate(self, num_removed: Sequence[int]) -> None:
        self.slots.set_lengths([length - number for length, number in zip(self.lengths, num_removed, strict=True)])

    def restore(self, caller_cache: Any) -> None:
        """Moves the committed entries back to the cache they came from; shorter rows end in zeros."""
        move_to(caller_cache, self.layers, self.buffers, self.lengths)
        self.layers.clear()
        self.buffers.free()
