"""A key-value cache for draft trees: rows advance by different lengths, and accepted entries are kept in place."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ...internals import mark_static_address
from ..tree.draft_tree import DraftTree, tree_attention_mask
from ..tree.uploads import upload
from .rollback import STATE_LAYERS, owned
from .target_memory import StaticMemory
from .tree_states import CONVOLUTIONS, RECURRENCES, TreeStates


# Slots added to outgrown buffers, or a quarter of those in use where that is more.
GROWTH = 512
# A copy of the cache needs this share of it twice at a time, or this many bytes where that is more.
MOVED_SHARE = 1 / 16
MOVED_BYTES = 2**26


class TreeCacheLayer(DynamicLayer):
    """
    Keys and values `(B, heads, slots, head_dim)` of one layer. Slots before `first_slot` are empty. Layers with a
    `window` hold the slots of a [`_Span`] alone.
    """

    first_slot = 0
    window: int | None = None


@dataclass
class _Span:
    """The slots that layers with a window hold: `size` of them from `first` on."""

    first: int
    size: int


class TreeCache(Cache):
    """
    A cache that holds every position of the context, each row at its own length, and then the entries of the newest
    pass until a path of them is kept. Passes see the slots up to the newest entry of the longest row. Outgrown
    buffers are replaced by larger ones. Layers with a window drop entries that no row sees any more.

    After [`fix_shapes`] passes see all slots and read no number from the host, so that they can be compiled once. The
    cache then never grows.

    Args:
        batch_size (`int`): Number of rows, `B`.
        capacity (`int`): Slots to allocate per row.
        memory (`StaticMemory`, *optional*): Allocates the buffers, where a captured graph reads them.

    Attributes:
        lengths: Committed slots of each row.
        num_pending: Uncommitted entries after the committed ones. The next pass writes after them.
        context_mask (`(B, T)`, bool, *optional*): False at committed slots that no pass sees (padding). All slots
            after them are seen.
        states: The states of layers that have any, which the caller's cache holds meanwhile.
    """

    def __init__(self, batch_size: int, capacity: int, memory: StaticMemory | None = None):
        super().__init__(layers=[])
        self.capacity = capacity
        self.memory = memory
        self.lengths = [0] * batch_size
        self._longest, self._is_uniform = 0, True  # of the lengths: the largest, and whether they are all alike
        self.num_pending = 0
        self.context_mask: torch.Tensor | None = None
        self.states: TreeStates | None = None
        self._prompt_lengths = self.lengths
        self._device_lengths: torch.Tensor | None = None  # `lengths` as `(B, 1)`, with fixed shapes
        self._spans: dict[int | None, _Span] = {}  # by window
        self._is_running = [True] * batch_size  # rows whose newest path was not empty
        # Buffers `(n, B, heads, slots, head_dim)`, each with its `n` layers and names ("keys" or "values").
        # Layers of one shape share a buffer, so that one step rearranges them all.
        self._groups: list[tuple[torch.Tensor, list[tuple[Any, str]]]] = []
        # Indices that each layer asks for, until the number of slots changes.
        self._known: dict[Any, torch.Tensor] = {}

    @classmethod
    def from_dynamic(
        cls,
        cache: DynamicCache,
        capacity: int,
        context_mask: torch.Tensor | None = None,
        memory: StaticMemory | None = None,
        length: int | None = None,
        can_rewind: bool = False,
        num_nodes: int | None = None,
    ) -> "TreeCache":
        """
        Moves the entries of a cache that [`is_convertible`] accepts here, a few layers at a time; [`restore`] moves
        them back, also if an error ends the move. A sliding layer has dropped the entries before its window: their
        slots stay empty.

        Args:
            cache: The cache, after a prefill.
            capacity, memory: As for the class.
            context_mask: As for [`hide`].
            length: Entries of the prompt; by default the cache counts them, which one of states alone cannot.
            can_rewind: Whether [`truncate`] may be called with states, which takes a copy of them.
            num_nodes: Nodes of a pass. With it, sliding layers hold no more than their window and a pass. Shapes are
                then not fixed.
        """
        length = cache.get_seq_length() if length is None else length
        # Layers that read the keys and values of another one have none of their own, nor have those of states alone.
        pairs = [(TreeCacheLayer(), old) for old in cache.layers]
        filled = [(new, old) for new, old in pairs if getattr(old, "keys", None) is not None]
        has_states = any(isinstance(layer, STATE_LAYERS) for layer in cache.layers)
        states = TreeStates(cache.layers, memory, can_rewind) if has_states else None
        num_rows = filled[0][1].keys.shape[0] if states is None else states.num_rows
        tree_cache = cls(num_rows, max(capacity, length), memory)
        tree_cache.states = states
        tree_cache.layers = [new for new, _ in pairs]
        # States go back to the prompt, whose window is then needed.
        if num_nodes is not None and states is None:
            tree_cache._hold_windows(filled, length, num_nodes)
        # Outgrown buffers are copied with their free slots.
        num_bytes = sum(
            (old.keys.nbytes + old.values.nbytes) * tree_cache._num_slots(new.window) // max(old.keys.shape[2], 1)
            for new, old in filled
        )
        at_once = max(int(len(filled) * max(MOVED_SHARE, MOVED_BYTES / max(num_bytes, 1))), 1)
        tree_cache.commit([length] * len(tree_cache.lengths))
        tree_cache._prompt_lengths = tree_cache.lengths
        try:
            for first in range(0, len(filled), at_once):
                moved = filled[first : first + at_once]
                tree_cache.allocate([(new, old.keys, old.values) for new, old in moved])
                for new, old in moved:
                    new.first_slot = length - old.keys.shape[2]
                    slots = slice(
                        new.first_slot - tree_cache._first(new.window), length - tree_cache._first(new.window)
                    )
                    new.keys[:, :, slots], new.values[:, :, slots] = old.keys, old.values
                    old.keys = old.values = None
        except BaseException:
            # Above all out of memory, as the cache exists twice in part.
            tree_cache.restore(cache)
            raise
        tree_cache.hide(context_mask)
        return tree_cache

    def _hold_windows(self, layers: Sequence[tuple[TreeCacheLayer, Any]], length: int, num_nodes: int) -> None:
        """Notes which layers hold a window alone: sliding ones, unless they record the past for the caller."""
        for new, old in layers:
            if isinstance(old, DynamicSlidingWindowLayer) and not old.record_past:
                new.window = window = old.sliding_window
                num_held = max(old.keys.shape[2], length - self._first(window) if window in self._spans else 0)
                # With room for further tokens, so that entries are seldom dropped.
                size = min(num_held + num_nodes + window // 2, self.capacity - (length - num_held))
                self._spans[window] = _Span(length - num_held, size)

    def _first(self, window: int | None) -> int:
        """Returns the first slot that layers with this window hold."""
        return self._spans[window].first if window in self._spans else 0

    def _num_slots(self, window: int | None) -> int:
        """Returns how many slots layers with this window hold."""
        return self._spans[window].size if window in self._spans else self.capacity

    def hide(self, context_mask: torch.Tensor | None) -> None:
        """Hides the entries where `context_mask` `(B, T)` is zero (padding) from all passes that follow."""
        self.context_mask = context_mask.bool() if context_mask is not None else None

    def fix_shapes(self, device: torch.device) -> None:
        """Fixes the shapes of all later passes. `device` is where they read how many slots are committed."""
        self.context_mask = _extended(self.context_mask, self.capacity)
        lengths = upload(self.lengths, device)[:, None]
        self._device_lengths = lengths if self.memory is None else self.memory.copy(lengths)
        # A captured graph reads and writes these where they are; without the mark, each replay would copy them.
        for tensor in (tensor for layer in self.layers for tensor in (layer.keys, layer.values)):
            if tensor is not None:
                mark_static_address(tensor)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Writes new entries `(B, heads, n, head_dim)` after the committed and pending ones of each row. Returns the keys
        and values that the pass sees.
        """
        while len(self.layers) <= layer_idx:
            self.layers.append(TreeCacheLayer())
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            self.allocate([(layer, key_states, value_states)])
        write = self._write if self._device_lengths is None else self._write_in_fixed_shapes
        return write(layer, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Returns the slots of the longest row, pending ones included; a tensor `()` where shapes are fixed."""
        longest: Any = self._longest if self._device_lengths is None else self._device_lengths.max()
        return longest + self.num_pending

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        is_fixed = self._device_lengths is not None
        return self.capacity if is_fixed else self.get_seq_length() + query_length, 0

    def starts(self, device: torch.device) -> int | torch.Tensor:
        """Returns the committed slots, `(B, 1)` on `device`; a number where the host knows that all rows agree."""
        if self._device_lengths is not None:
            return self._device_lengths.to(device)
        return self.lengths[0] if self._is_uniform else self._starts_of_rows(device)

    def attention_mask(
        self, visible: torch.Tensor, depths: torch.Tensor, dtype: torch.dtype, window: int | None = None
    ) -> torch.Tensor:
        """Returns the mask of the next pass; the arguments are those of [`tree_attention_mask`]."""
        if self._device_lengths is not None:
            starts = self.starts(visible.device)
            return tree_attention_mask(visible, depths, starts, self.capacity, dtype, self.context_mask, window)
        num_slots = max(self.lengths) + visible.shape[2]
        self.context_mask = context_mask = _extended(self.context_mask, num_slots)
        if window in self._spans:
            self._make_room(window, num_slots)
        first = self._first(window)
        if context_mask is not None:
            context_mask = context_mask[:, first:]
        starts = self._starts_after(first, visible.device)
        return tree_attention_mask(visible, depths, starts, num_slots - first, dtype, context_mask, window)

    def _make_room(self, window: int | None, stop: int) -> None:
        """Makes layers with this window hold the slots up to `stop`, without those that no running row sees."""
        span = self._spans[window]
        if window is None or stop <= span.first + span.size:
            return
        running = [*compress(self.lengths, self._is_running)] or self.lengths
        first = max(min(running) - window, span.first)
        size = stop - first + window // 2
        self._replace_buffers(window, first - span.first, size)
        span.first, span.size = first, size

    def needs_no_mask(self, num_new: int, window: int | None = None) -> bool:
        """Returns whether the host knows that `num_new` new entries see all slots, as in a step of plain decoding."""
        is_alone = self._device_lengths is None and num_new == 1 and self.num_pending == 0 and self._is_uniform
        return is_alone and self.context_mask is None and (window is None or max(self.lengths) < window)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self.states and self.states.read((CONVOLUTIONS, layer_idx, state_idx))

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        return self.states and self.states.write((CONVOLUTIONS, layer_idx, state_idx), conv_states, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self.states and self.states.read((RECURRENCES, layer_idx, state_idx))

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        return self.states and self.states.write((RECURRENCES, layer_idx, state_idx), recurrent_states, **kwargs)

    def begin_pass(self, tree: DraftTree) -> None:
        """Prepares a pass over `tree`, where layers hold states."""
        if self.states is not None:
            self.states.begin_pass(tree)

    def keep_path(self, nodes: torch.Tensor, accepted_lengths: Sequence[int]) -> None:
        """
        Moves the entries of the first `accepted_lengths[b]` of the `nodes` `(B, L)` to the slots after the committed
        ones, and commits them.
        """
        if self.states is not None:
            self.states.keep(nodes, accepted_lengths)
        if self._device_lengths is not None:
            # As many nodes every time; the entries after the accepted ones are dropped again.
            self._move(nodes)
        elif (longest := max(accepted_lengths)) > 1:
            # The root is the first entry and stays where it is.
            self._move(nodes[:, :longest])
        self.commit(accepted_lengths)

    def commit(self, accepted_lengths: Sequence[int]) -> None:
        """Commits the first `accepted_lengths[b]` of the newest entries of each row, and drops all others."""
        self.count(accepted_lengths)
        if self._device_lengths is not None:
            self._device_lengths.copy_(upload(self.lengths, self._device_lengths.device)[:, None])

    def commit_on_device(self, accepted_lengths: torch.Tensor) -> None:
        """The same within a compiled stage, for lengths `(B,)` on the device. The host calls [`count`] after it."""
        if self._device_lengths is not None:
            self._device_lengths.add_(accepted_lengths[:, None])
        self.num_pending = 0

    def count(self, accepted_lengths: Sequence[int]) -> None:
        """Counts committed entries on the host."""
        self.lengths = [length + number for length, number in zip(self.lengths, accepted_lengths, strict=True)]
        self._longest, self._is_uniform = max(self.lengths), min(self.lengths) == max(self.lengths)
        self._is_running = [number > 0 for number in accepted_lengths]
        self.num_pending = 0
        self._known.clear()

    def truncate(self, num_removed: Sequence[int]) -> None:
        """
        Removes the newest `num_removed[b]` committed entries of each row. States go back to the prompt alone: with
        states, all entries after it are removed.
        """
        if self.states is not None and any(num_removed):
            self.states.rewind()
            num_removed = [now - then for now, then in zip(self.lengths, self._prompt_lengths, strict=True)]
        self.commit([-number for number in num_removed])

    @property
    def min_length(self) -> int:
        """Rows cannot be truncated to fewer entries than this, as entries before a window are gone."""
        return max((span.first + (window or 0) - 1 for window, span in self._spans.items() if span.first), default=0)

    def restore(self, cache: DynamicCache) -> None:
        """
        Moves the committed entries back to the cache that they came from; shorter rows end in zeros. A sliding layer
        that records the past also gets its entries before the window. This cache is empty afterwards.
        """
        if self.states is not None:
            self.states.restore()
        length = max(self.lengths)
        for group, users in self._groups:
            first = self._first(users[0][0].window)
            for row, end in enumerate(self.lengths):
                group[:, row, :, max(end - first, 0) : length - first] = 0
        restored = []
        for old, new in zip(cache.layers, self.layers, strict=True):
            if new.keys is None or getattr(old, "keys", None) is not None:
                continue  # never moved here
            start = new.first_slot
            if isinstance(old, DynamicSlidingWindowLayer):
                old.cumulative_length = length
                if not old.record_past:
                    start = max(length - old.sliding_window + 1, start)
            slots = slice(start - self._first(new.window), length - self._first(new.window))
            old.keys, old.values = new.keys[:, :, slots], new.values[:, :, slots]
            restored.append(old)
        # All layers are whole from here on, also if there is no memory for copies.
        self.layers.clear()
        self._groups.clear()
        for old in restored:
            # A view keeps all of a buffer alive, and is saved with it. Each buffer is freed with its last layer.
            old.keys, old.values = owned(old.keys), owned(old.values)

    def _starts_of_rows(self, device: torch.device) -> torch.Tensor:
        if device not in self._known:
            self._known[device] = upload(self.lengths, device)[:, None]
        return self._known[device]

    def _starts_after(self, first: int, device: torch.device) -> int | torch.Tensor:
        """Returns the committed slots counted from `first`, as [`starts`] does."""
        starts = self.starts(device)
        if first == 0:
            return starts
        # Rows that have ended may lie before it. Nobody reads what they compute.
        return starts - first if isinstance(starts, int) else (starts - first).clamp(min=0)

    def _write(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_new, span = keys.shape[2], self._spans.get(layer.window)
        first = 0 if span is None else span.first
        stop = self._longest + self.num_pending + num_new - first
        if stop > layer.keys.shape[2]:
            self.reserve(stop, layer.window)
        for buffer, states in ((layer.keys, keys), (layer.values, values)):
            if self._is_uniform:
                buffer[:, :, stop - num_new : stop] = states
            else:
                index = self._index_of_new(states.shape[1], num_new, first, buffer)
                buffer.view(-1, buffer.shape[3]).index_copy_(0, index, states.reshape(-1, states.shape[3]))
        return layer.keys[:, :, :stop], layer.values[:, :, :stop]

    def _write_in_fixed_shapes(
        self, layer: Any, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = torch.arange(keys.shape[2], device=keys.device)
        slots = self.starts(keys.device) + (self.num_pending + new)
        for buffer, states in ((layer.keys, keys), (layer.values, values)):
            if slots.shape[0] == 1:
                buffer.index_copy_(2, slots[0], states)
            else:
                rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
                buffer.transpose(1, 2).index_put_((rows, slots), states.transpose(1, 2))
        return layer.keys, layer.values

    def _index_of_new(self, num_heads: int, num_new: int, first: int, buffer: torch.Tensor) -> torch.Tensor:
        """Returns `(B * num_heads * num_new,)`: the new entries in a layer's flattened buffer."""
        device, num_slots = buffer.device, buffer.shape[2]
        key = device, num_heads, num_new, self.num_pending, first, num_slots
        if key not in self._known:
            slots = self._starts_after(first, device) + self.num_pending + torch.arange(num_new, device=device)
            firsts = _first_slots((len(self.lengths), num_heads), num_slots, device)
            self._known[key] = (firsts + slots[:, None]).flatten()
        return self._known[key]

    def allocate(self, states: Sequence[tuple[Any, torch.Tensor, torch.Tensor]]) -> None:
        """Gives each layer buffers for keys and values like the given ones."""
        members = defaultdict(list)
        for layer, keys, values in states:
            for name, like in (("keys", keys), ("values", values)):
                kind = like.shape[1], like.shape[3], like.dtype, like.device, layer.window
                members[kind].append((layer, name))
            layer.is_initialized = True
        for (num_heads, head_dim, dtype, device, window), users in members.items():
            # Zeros, not empty: attention multiplies masked values by zero, and NaN times zero is NaN.
            make_zeros = torch.zeros if self.memory is None else self.memory.zeros
            shape = (len(users), len(self.lengths), num_heads, self._num_slots(window), head_dim)
            self.add_group(make_zeros(shape, dtype=dtype, device=device), users)

    def add_group(self, group: torch.Tensor, users: list[tuple[Any, str]]) -> None:
        self._groups.append((group, users))
        for view, (layer, name) in zip(group, users, strict=True):
            setattr(layer, name, view)

    def reserve(self, num_slots: int, window: int | None = None) -> None:
        """Makes layers with this window, or those without one, hold at least `num_slots` slots."""
        if window in self._spans:
            self._spans[window].size = num_slots + (window or 0) // 2
        else:
            self.capacity = num_slots + max(GROWTH, num_slots // 4)
        self._replace_buffers(window, 0, self._num_slots(window))

    def _replace_buffers(self, window: int | None, num_dropped: int, num_slots: int) -> None:
        """
        Copies the buffers of layers with this window, a few layers at a time, to larger ones of `num_slots`, without
        their first `num_dropped` slots.
        """
        self._known.clear()
        outgrown = [group for group in self._groups if group[1][0][0].window == window]
        self._groups = [group for group in self._groups if group[1][0][0].window != window]
        num_moved = max(sum(group.nbytes for group, _ in outgrown) * MOVED_SHARE, MOVED_BYTES)
        while outgrown:
            group, users = outgrown.pop()
            at_once = max(int(num_moved / group[0].nbytes), 1)
            for first in range(0, len(users), at_once):
                old = group[first : first + at_once, :, :, num_dropped:]
                grown = old.new_zeros(*old.shape[:3], num_slots, old.shape[4])
                grown[:, :, :, : old.shape[3]] = old
                self.add_group(grown, users[first : first + at_once])

    def _move(self, nodes: torch.Tensor) -> None:
        """Moves entries `nodes` `(B, n)`, counted from the committed ones, to the slots right after these."""
        known: dict[Any, Any] = {}  # groups that are alike share their indices
        for group, users in self._groups:
            device, first = group.device, self._first(users[0][0].window)
            kind = device, first, *group.shape[:4]
            if kind not in known:
                starts = self._starts_after(first, device)
                kept = (starts + torch.arange(nodes.shape[1], device=device)).expand(nodes.shape)
                firsts = _first_slots(group.shape[:3], group.shape[3], device)
                known[kind] = [(firsts + slots[:, None]).flatten() for slots in (starts + nodes.to(device), kept)]
            source, target = known[kind]
            # Rows of the flattened buffer: several times as fast as gathering and scattering single numbers.
            entries = group.view(-1, group.shape[4])
            entries.index_copy_(0, target, entries.index_select(0, source))


def _first_slots(shape: Sequence[int], capacity: int, device: torch.device) -> torch.Tensor:
    """Returns `(*shape, 1)`: the first slots in buffers `(*shape, capacity, ...)` whose first dimensions are flat."""
    return torch.arange(math.prod(shape), device=device).view(*shape, 1) * capacity


def _extended(context_mask: torch.Tensor | None, num_slots: int) -> torch.Tensor | None:
    """Makes a mask cover at least `num_slots` slots, the new ones visible."""
    if context_mask is None or context_mask.shape[1] >= num_slots:
        return context_mask
    return pad(context_mask, (0, num_slots - context_mask.shape[1]), value=True)
