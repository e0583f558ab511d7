"""A key-value cache for draft trees: rows advance by different lengths, and accepted entries are kept in place."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ...internals import mark_static_address
from ..tree.draft_tree import DraftTree, tree_attention_mask
from ..tree.uploads import upload
from .rollback import owned
from .target_memory import StaticMemory
from .tree_states import CONVOLUTIONS, RECURRENCES, TreeStates


# Slots added to outgrown buffers, or a quarter of those in use where that is more.
GROWTH = 512
# A copy of the cache needs this share of it twice at a time, or this many bytes where that is more.
MOVED_SHARE = 1 / 16
MOVED_BYTES = 2**26


@dataclass(eq=False)
class Span:
    """
    The slots that layers with the same `window` hold, or all layers without one: `size` of them, from `first` on.

    `groups` are their buffers `(n, B, heads, size, head_dim)`, each with its `n` layers and names ("keys" or
    "values"). Layers of one shape share a buffer, so that one step rearranges them all.
    """

    window: int | None
    size: int
    first: int = 0
    groups: list[tuple[torch.Tensor, list[tuple[Any, str]]]] = field(default_factory=list)


class TreeCacheLayer(DynamicLayer):
    """Keys and values `(B, heads, slots, head_dim)` of one layer. Slots before `first_slot` are empty."""

    def __init__(self, span: Span):
        super().__init__()
        self.span = span
        self.first_slot = 0


class TreeCache(Cache):
    """
    A cache that holds every position of the context, each of `batch_size` rows at its own length, and then the entries
    of the newest pass until a path of them is kept. Passes see the slots up to the newest entry of the longest row.
    Layers without a window have `capacity` slots at first; outgrown buffers are replaced by larger ones. Layers with a
    window drop entries that no row sees any more. `memory` allocates buffers that a captured graph reads.

    After [`fix_shapes`] passes see all slots and read no number from the host, so that they can be compiled once. The
    cache then never grows.

    Attributes:
        lengths: Committed slots of each row.
        num_pending: Uncommitted entries after the committed ones. The next pass writes after them.
        context_mask (`(B, T)`, bool, *optional*): False at committed slots that no pass sees (padding). All slots
            after them are seen.
        states: The states of layers that have any, which the caller's cache holds meanwhile.
        prompt_length: Entries of the prompt, to which states can go back.
        spans: The slots that layers hold, by their window.
    """

    def __init__(self, batch_size: int, capacity: int, memory: StaticMemory | None = None):
        super().__init__(layers=[])
        self.spans: dict[int | None, Span] = {None: Span(None, capacity)}
        self.memory = memory
        self.lengths = [0] * batch_size
        self._longest, self._is_uniform = 0, True  # of the lengths: the largest, and whether they are all alike
        self.num_pending = 0
        self.context_mask: torch.Tensor | None = None
        self.states: TreeStates | None = None
        self.prompt_length = 0
        self._device_lengths: torch.Tensor | None = None  # `lengths` as `(B, 1)`, with fixed shapes
        self._is_running = [True] * batch_size  # rows whose newest path was not empty
        # Indices that each layer asks for, until the number of slots changes.
        self._known: dict[Any, torch.Tensor] = {}

    @property
    def capacity(self) -> int:
        """Slots of a row in layers without a window."""
        return self.spans[None].size

    def hide(self, context_mask: torch.Tensor | None) -> None:
        """Hides the entries where `context_mask` `(B, T)` is zero (padding) from all passes that follow."""
        self.context_mask = context_mask.bool() if context_mask is not None else None

    def fix_shapes(self, device: torch.device) -> None:
        """Fixes the shapes of all later passes. `device` is where they read how many slots are committed."""
        self.context_mask = _extended(self.context_mask, self.capacity)
        lengths = upload(self.lengths, device)[:, None]
        self._device_lengths = lengths if self.memory is None else self.memory.copy(lengths)
        # A captured graph reads and writes these where they are; without the mark, each replay would copy them.
        for layer in self.layers:
            for tensor in (layer.keys, layer.values):
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
            self.layers.append(TreeCacheLayer(self.spans[None]))
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
        if self._is_uniform:
            return self.lengths[0]
        if device not in self._known:
            self._known[device] = upload(self.lengths, device)[:, None]
        return self._known[device]

    def attention_mask(
        self, visible: torch.Tensor, depths: torch.Tensor, dtype: torch.dtype, window: int | None = None
    ) -> torch.Tensor:
        """Returns the mask of the next pass; the arguments are those of [`tree_attention_mask`]."""
        if self._device_lengths is not None:
            starts = self.starts(visible.device)
            return tree_attention_mask(visible, depths, starts, self.capacity, dtype, self.context_mask, window)
        num_slots = max(self.lengths) + visible.shape[2]
        self.context_mask = context_mask = _extended(self.context_mask, num_slots)
        span = self.spans.get(window, self.spans[None])
        self._make_room(span, num_slots)
        first = span.first
        if context_mask is not None:
            context_mask = context_mask[:, first:]
        starts = self._starts_after(first, visible.device)
        return tree_attention_mask(visible, depths, starts, num_slots - first, dtype, context_mask, window)

    def _make_room(self, span: Span, stop: int) -> None:
        """Makes layers with a window hold the slots up to `stop`, without those that no running row sees."""
        if span.window is None or stop <= span.first + span.size:
            return
        # What the slowest running row still sees stays. A row that has ended sees nothing that anybody reads.
        running = [*compress(self.lengths, self._is_running)] or self.lengths
        first = max(min(running) - span.window, span.first)
        self._replace_buffers(span, first, stop - first + span.window // 2)

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
        Removes the newest `num_removed[b]` committed entries of each row; with states all entries after the prompt, as
        states go back to it alone.
        """
        if self.states is not None and any(num_removed):
            self.states.rewind()
            num_removed = [length - self.prompt_length for length in self.lengths]
        self.commit([-number for number in num_removed])

    @property
    def min_length(self) -> int:
        """Rows cannot be truncated to fewer entries than this, as entries before a window are gone."""
        return max((span.first + (span.window or 0) - 1 for span in self.spans.values() if span.first), default=0)

    def restore(self, cache: DynamicCache) -> None:
        """
        Moves the committed entries back to the cache that they came from; shorter rows end in zeros. A sliding layer
        that records the past also gets those before the window. This cache is empty afterwards.
        """
        if self.states is not None:
            self.states.restore()
        length = max(self.lengths)
        for span in self.spans.values():
            for group, _ in span.groups:
                for row, end in enumerate(self.lengths):
                    group[:, row, :, max(end - span.first, 0) : length - span.first] = 0
        restored = []
        for old, new in zip(cache.layers, self.layers, strict=True):
            if new.keys is None or getattr(old, "keys", None) is not None:
                continue  # never moved here
            start, first = new.first_slot, new.span.first
            if isinstance(old, DynamicSlidingWindowLayer):
                old.cumulative_length = length
                if not old.record_past:
                    start = max(length - old.sliding_window + 1, start)
            slots = slice(start - first, length - first)
            old.keys, old.values = new.keys[:, :, slots], new.values[:, :, slots]
            restored.append(old)
        # All layers are whole from here on, also if there is no memory for copies.
        self.layers.clear()
        for span in self.spans.values():
            span.groups.clear()
        for old in restored:
            # A view keeps all of a buffer alive, and is saved with it. Each buffer is freed with its last layer.
            old.keys, old.values = owned(old.keys), owned(old.values)

    def _starts_after(self, first: int, device: torch.device) -> int | torch.Tensor:
        """Returns the committed slots counted from `first`, as [`starts`] does."""
        starts = self.starts(device)
        if first == 0:
            return starts
        # Rows that have ended may lie before it. Nobody reads what they compute.
        return starts - first if isinstance(starts, int) else (starts - first).clamp(min=0)

    def _write(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_new, first = keys.shape[2], layer.span.first
        stop = self._longest + self.num_pending + num_new - first
        if stop > layer.keys.shape[2]:
            self.reserve(stop, layer.span)
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
                kind = like.shape[1], like.shape[3], like.dtype, like.device, layer.span
                members[kind].append((layer, name))
            layer.is_initialized = True
        for (num_heads, head_dim, dtype, device, span), users in members.items():
            # Zeros, not empty: attention multiplies masked values by zero, and NaN times zero is NaN.
            make_zeros = torch.zeros if self.memory is None else self.memory.zeros
            shape = (len(users), len(self.lengths), num_heads, span.size, head_dim)
            self.add_group(make_zeros(shape, dtype=dtype, device=device), users)

    def add_group(self, group: torch.Tensor, users: list[tuple[Any, str]]) -> None:
        users[0][0].span.groups.append((group, users))
        for view, (layer, name) in zip(group, users, strict=True):
            setattr(layer, name, view)

    def reserve(self, num_slots: int, span: Span | None = None) -> None:
        """Makes the layers of a span, by default those without a window, hold at least `num_slots` slots."""
        span = span or self.spans[None]
        num_spare = max(GROWTH, num_slots // 4) if span.window is None else span.window // 2
        self._replace_buffers(span, span.first, num_slots + num_spare)

    def _replace_buffers(self, span: Span, first: int, size: int) -> None:
        """Copies the buffers of a span, a few layers at a time, to larger ones of `size` slots from `first` on."""
        self._known.clear()
        num_dropped = first - span.first
        outgrown, span.groups, span.first, span.size = span.groups, [], first, size
        num_moved = max(sum(group.nbytes for group, _ in outgrown) * MOVED_SHARE, MOVED_BYTES)
        # Each buffer is freed as soon as its layers have new ones.
        while outgrown:
            group, users = outgrown.pop()
            at_once = max(int(num_moved / group[0].nbytes), 1)
            for start in range(0, len(users), at_once):
                old = group[start : start + at_once, :, :, num_dropped:]
                grown = old.new_zeros(*old.shape[:3], size, old.shape[4])
                grown[:, :, :, : old.shape[3]] = old
                self.add_group(grown, users[start : start + at_once])

    def _move(self, nodes: torch.Tensor) -> None:
        """Moves entries `nodes` `(B, n)`, counted from the committed ones, to the slots right after these."""
        known: dict[Any, Any] = {}  # groups that are alike share their indices
        groups = [(span.first, group) for span in self.spans.values() for group, _ in span.groups]
        for first, group in groups:
            device = group.device
            kind = device, first, *group.shape[:4]
            if kind not in known:
                # In each row and head, slots counted from the first one of the flattened buffer.
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
    # Two rows of three heads with 10 slots each: 0, 10 and 20 in the first row, 30, 40 and 50 in the second.
    return torch.arange(math.prod(shape), device=device).view(*shape, 1) * capacity


def _extended(context_mask: torch.Tensor | None, num_slots: int) -> torch.Tensor | None:
    """Makes a mask cover at least `num_slots` slots, the new ones visible."""
    if context_mask is None or context_mask.shape[1] >= num_slots:
        return context_mask
    return pad(context_mask, (0, num_slots - context_mask.shape[1]), value=True)
