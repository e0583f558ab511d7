"""A key-value cache for draft trees: rows advance by different lengths, and accepted entries are kept in place."""

import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


# The layers of an ordinary cache whose entries can be taken over. Releases of transformers that know a dummy layer put
# it where a layer reads the keys and values of another one; earlier ones leave such layers out.
CONVERTIBLE_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    *([cache_utils.DummyLayer] if hasattr(cache_utils, "DummyLayer") else []),
)
# Slots added when a cache outgrows its buffers.
GROWTH = 4096
# Moving a cache here holds so much of it twice at a time: this share, or so many bytes where that is more.
MOVED_SHARE = 1 / 16
MOVED_BYTES = 2**24


class TreeCacheLayer(CacheLayerMixin):
    """
    One layer of a [`TreeCache`]: preallocated `keys` and `values`, each `(B, heads, capacity, head_dim)`.

    `update` writes after the committed entries of each row and returns everything up to the newest entry of the
    longest row. What is written stays only if the cache commits it.
    """

    is_sliding = False

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
        self.cache.allocate([(self, key_states, value_states)])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_new = key_states.shape[2]
        stop = self.get_seq_length() + num_new
        if stop > self.cache.capacity:
            self.cache.reserve(stop)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if self.cache.is_uniform:
                buffer[:, :, stop - num_new : stop] = states
            else:
                index = self.cache.new_entries(states.shape[1], num_new, buffer.device)
                buffer.view(-1, buffer.shape[3]).index_copy_(0, index, states.reshape(-1, states.shape[3]))
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def update_at(
        self, key_states: torch.Tensor, value_states: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes states `(B, heads, n, head_dim)` to `slots` `(B, n)`; returns the whole buffers."""
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if slots.shape[0] == 1:
                buffer.index_copy_(2, slots[0], states)
            else:
                rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
                buffer.transpose(1, 2).index_put_((rows, slots), states.transpose(1, 2))
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return -1

    # Abstract under this name in earlier releases of transformers.
    get_max_cache_shape = get_max_length


class TreeCache(Cache):
    """
    A cache that holds every position of the context, each row at its own length, plus entries on probation.

    Args:
        batch_size (`int`): Number of rows, `B`.
        capacity (`int`): Slots to allocate per row. Grows in large steps where that does not suffice.

    Attributes:
        lengths (`list[int]`): Committed slots of each row.
        num_pending (`int`): Uncommitted slots behind the committed ones that the next `update` writes after.
        starts (`(B, 1)`, *optional*): `lengths` on the device, once [`fix_shapes`] was called. From then on `update`
            returns all slots and reads no number from the host, so that a pass can be compiled once.
    """

    def __init__(self, batch_size: int, capacity: int):
        super().__init__(layers=[])
        self.layers: list[TreeCacheLayer]
        self.lengths = [0] * batch_size
        self.num_pending = 0
        self.starts: torch.Tensor | None = None
        self.capacity = capacity
        # Of the newest pass of a target whose decoder has the hook `keep_last_hidden_state`.
        self.last_hidden_state: torch.Tensor | None = None
        # Buffers (places, B, heads, capacity, head_dim): layers of one shape share one, to be rearranged in one step.
        self._groups: list[tuple[torch.Tensor, list[tuple[TreeCacheLayer, str]]]] = []
        # What every layer asks for again until the number of slots changes.
        self._row_starts: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._new_entries: dict[tuple[torch.device, int, int, int], torch.Tensor] = {}

    @property
    def is_uniform(self) -> bool:
        """Whether all rows hold the same number of committed slots."""
        return len(self.lengths) == 1 or min(self.lengths) == max(self.lengths)

    def row_starts(self, device: torch.device) -> torch.Tensor:
        """Returns `(B, 1)`: the slot at which the next `update` writes in each row."""
        key = device, self.num_pending
        if key not in self._row_starts:
            self._row_starts[key] = torch.tensor(self.lengths, device=device)[:, None] + self.num_pending
        return self._row_starts[key]

    def new_entries(self, num_heads: int, num_new: int, device: torch.device) -> torch.Tensor:
        """
        Returns `(B * num_heads * num_new,)`: where the next `update` writes, in a layer's buffer flattened to
        `(B * num_heads * capacity, head_dim)`.
        """
        key = device, num_heads, num_new, self.num_pending
        if key not in self._new_entries:
            slots = self.row_starts(device) + torch.arange(num_new, device=device)
            first_slots = _first_slots((len(self.lengths), num_heads), self.capacity, device)
            self._new_entries[key] = (first_slots + slots[:, None]).flatten()
        return self._new_entries[key]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.starts is not None:
            new = torch.arange(key_states.shape[2], device=key_states.device)
            slots = self.starts.to(key_states.device) + (self.num_pending + new)
            return self.layers[layer_idx].update_at(key_states, value_states, slots)
        while len(self.layers) <= layer_idx:
            self.layers.append(TreeCacheLayer(self))
        return self.layers[layer_idx].update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Returns the slots of the longest row; a tensor `()` where shapes are fixed."""
        if self.starts is not None:
            return self.starts.max() + self.num_pending
        return max(self.lengths) + self.num_pending

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        if self.starts is not None:
            return self.capacity, 0
        return max(self.lengths) + self.num_pending + query_length, 0

    def fix_shapes(self, device: torch.device) -> None:
        """
        Makes every later pass see all slots. The cache must have room for whatever follows: it grows no more.

        Args:
            device: Where the number of committed slots is kept.
        """
        self.starts = torch.tensor(self.lengths, device=device)[:, None]
        # A captured graph reads and writes these where they lie; without the mark it would copy them in every replay.
        for tensor in (self.starts, *(tensor for layer in self.layers for tensor in (layer.keys, layer.values))):
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)

    def allocate(self, states: list[tuple[TreeCacheLayer, torch.Tensor, torch.Tensor]]) -> None:
        """Gives each layer buffers for keys and values like the given ones; those that agree share a group."""
        members = defaultdict(list)
        for layer, keys, values in states:
            for name, like in (("keys", keys), ("values", values)):
                members[like.shape[1], like.shape[3], like.dtype, like.device].append((layer, name))
            layer.is_initialized = True
        for (num_heads, head_dim, dtype, device), places in members.items():
            # Zeros, not empty: attention multiplies masked values by zero, and NaN times zero is NaN.
            shape = (len(places), len(self.lengths), num_heads, self.capacity, head_dim)
            group = torch.zeros(shape, dtype=dtype, device=device)
            self._groups.append((group, places))
            _assign_views(group, places)

    def reserve(self, num_slots: int) -> None:
        """Grows the buffers to hold at least `num_slots` slots, and then some, as this copies them."""
        old_capacity, self.capacity = self.capacity, num_slots + GROWTH
        self._new_entries.clear()
        for index, (group, places) in enumerate(self._groups):
            grown = group.new_zeros(*group.shape[:3], self.capacity, group.shape[4])
            grown[:, :, :, :old_capacity] = group
            self._groups[index] = (grown, places)
            _assign_views(grown, places)

    def commit(self, counts: list[int], nodes: torch.Tensor | None = None) -> None:
        """
        Makes the newest entries permanent.

        Args:
            counts: How many entries each row keeps.
            nodes (`(B, at least max(counts))`, *optional*): Which ones, as offsets behind the committed entries, in
                increasing order. By default the first ones.
        """
        # The root is the first entry and stays where it is.
        if nodes is not None and self.starts is not None:
            # Of the same number of nodes every time; what is behind the kept ones is given up again.
            for group, _ in self._groups:
                _move_rows(group, nodes.to(group.device), self.starts.to(group.device))
        elif nodes is not None and max(counts) > 1:
            for group, _ in self._groups:
                self._compact(group, nodes[:, : max(counts)].to(group.device))
        self.set_lengths([length + count for length, count in zip(self.lengths, counts, strict=True)])

    @property
    def fixed_starts(self) -> torch.Tensor:
        """`starts`, of a cache whose shapes are fixed."""
        if self.starts is None:
            raise RuntimeError("Only with fixed shapes does the device know the committed slots. Call `fix_shapes`.")
        return self.starts

    def advance(self, counts: torch.Tensor) -> None:
        """
        Makes the first `counts[b]` of the newest entries permanent where shapes are fixed. Only the device knows the
        number of committed slots from then on; `lengths` stays as it was.
        """
        self.fixed_starts.add_(counts[:, None])
        self.num_pending = 0

    def set_lengths(self, lengths: list[int]) -> None:
        """Sets how many slots of each row are committed; what lies behind them is given up."""
        self.lengths = lengths
        self.num_pending = 0
        self._row_starts.clear()
        self._new_entries.clear()
        if self.starts is not None:
            self.starts.copy_(torch.tensor(lengths)[:, None])

    def _compact(self, group: torch.Tensor, nodes: torch.Tensor) -> None:
        """Moves the entries at `nodes` `(B, n)` to the first slots behind the committed entries."""
        start, num_kept = self.lengths[0], nodes.shape[1]
        if len(self.lengths) == 1:
            group[:, :, :, start : start + num_kept] = group.index_select(3, nodes[0] + start)
        else:
            _move_rows(group, nodes, self.row_starts(group.device))

    @classmethod
    def from_dynamic(cls, cache: DynamicCache, capacity: int) -> "TreeCache":
        """
        Moves the entries of an ordinary cache here. [`to_dynamic`] moves them back.

        A sliding layer of `cache` has dropped what lies before its window; those slots stay empty, as no later token
        sees them.
        """
        length = cache.get_seq_length()
        batch_size = next(layer.keys.shape[0] for layer in cache.layers if layer.keys is not None)
        tree_cache = cls(batch_size, max(capacity, length))
        tree_cache.layers = [TreeCacheLayer(tree_cache) for _ in cache.layers]
        # Layers that read the keys and values of another one have none of their own.
        pairs = [(new, old) for new, old in zip(tree_cache.layers, cache.layers, strict=True) if old.keys is not None]
        num_bytes = sum(old.keys.nbytes + old.values.nbytes for _, old in pairs)
        at_once = max(int(len(pairs) * max(MOVED_SHARE, MOVED_BYTES / max(num_bytes, 1))), 1)
        for first in range(0, len(pairs), at_once):
            moved = pairs[first : first + at_once]
            tree_cache.allocate([(new, old.keys, old.values) for new, old in moved])
            for new, old in moved:
                new.keys[:, :, length - old.keys.shape[2] : length] = old.keys
                new.values[:, :, length - old.values.shape[2] : length] = old.values
                old.keys = old.values = None
        tree_cache.set_lengths([length] * len(tree_cache.lengths))
        return tree_cache

    def to_dynamic(self, cache: DynamicCache) -> None:
        """Moves the committed entries back to the cache they came from; shorter rows end in zeros."""
        length = max(self.lengths)
        for group, _ in self._groups:
            for row, row_length in enumerate(self.lengths):
                group[:, row, :, row_length:length] = 0
        for old, new in zip(cache.layers, self.layers, strict=True):
            if not new.is_initialized:
                continue
            start = 0
            if isinstance(old, DynamicSlidingWindowLayer):
                start = max(length - old.sliding_window + 1, 0)
                old.cumulative_length = length
            old.keys, old.values = new.keys[:, :, start:length], new.values[:, :, start:length]
            # A view keeps all of the buffer alive; where most of that is not in use, a copy costs less.
            if self.capacity > 1.25 * (length - start):
                old.keys, old.values = old.keys.clone(), old.values.clone()
        self.layers.clear()
        self._groups.clear()


def is_convertible(cache: Any) -> bool:
    """Whether [`TreeCache.from_dynamic`] can take over the entries of `cache`."""
    return (
        isinstance(cache, DynamicCache)
        and not cache.offloading
        and all(type(layer) in CONVERTIBLE_LAYERS for layer in cache.layers)
    )


def _assign_views(group: torch.Tensor, places: list[tuple[TreeCacheLayer, str]]) -> None:
    for view, (layer, name) in zip(group, places, strict=True):
        setattr(layer, name, view)


def _move_rows(group: torch.Tensor, nodes: torch.Tensor, starts: torch.Tensor) -> None:
    """Moves the entries `nodes` `(B, n)` behind the slots `starts` `(B, 1)` to the first slots from there on."""
    kept = torch.arange(nodes.shape[1], device=group.device)
    first_slots = _first_slots(group.shape[:3], group.shape[3], group.device)
    source, target = ((first_slots + (starts + places)[:, None]).flatten() for places in (nodes, kept))
    # Whole rows: several times as fast as gathering and scattering single numbers.
    entries = group.view(-1, group.shape[4])
    entries.index_copy_(0, target, entries.index_select(0, source))


def _first_slots(shape: Sequence[int], capacity: int, device: torch.device) -> torch.Tensor:
    """
    Returns `(*shape, 1)`: where the slots of each head begin in buffers `(*shape, capacity, head_dim)` that are
    flattened but for the last dimension. `shape` ends in `(B, heads)`.
    """
    return torch.arange(math.prod(shape), device=device).view(*shape, 1) * capacity
