"""The memory of a cache for draft trees: layers of one shape share a buffer, to be rearranged in one step."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .static_memory import StaticMemory


# Slots added when buffers are outgrown, or a quarter of those in use where that is more.
GROWTH = 512
# Copying a cache holds so much of it twice at a time: this share, or so many bytes where that is more.
MOVED_SHARE = 1 / 16
MOVED_BYTES = 2**26


class CacheBuffers:
    """
    Preallocated keys and values of all layers of a cache.

    A layer is anything with `keys`, `values` and `is_initialized`; its keys and values are views
    `(B, heads, capacity, head_dim)` of a buffer here.

    Args:
        batch_size: Number of rows, `B`.
        capacity: Slots of each row.
        memory: Where the buffers are to lie. By default they are new.
    """

    def __init__(self, batch_size: int, capacity: int, memory: StaticMemory | None = None):
        self.batch_size = batch_size
        self.capacity = capacity
        self.memory = memory
        # Each buffer `(places, B, heads, capacity, head_dim)`, with the layers and names that its places are for.
        self._groups: list[tuple[torch.Tensor, list[tuple[Any, str]]]] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(group.nbytes for group, _ in self._groups)

    def allocate(self, states: Sequence[tuple[Any, torch.Tensor, torch.Tensor]]) -> None:
        """Gives each layer buffers for keys and values like the given ones; those that agree share a group."""
        members = defaultdict(list)
        for layer, keys, values in states:
            for name, like in (("keys", keys), ("values", values)):
                members[like.shape[1], like.shape[3], like.dtype, like.device].append((layer, name))
            layer.is_initialized = True
        for (num_heads, head_dim, dtype, device), places in members.items():
            # Zeros, not empty: attention multiplies masked values by zero, and NaN times zero is NaN.
            shape = (len(places), self.batch_size, num_heads, self.capacity, head_dim)
            make_zeros = torch.zeros if self.memory is None else self.memory.zeros
            group = make_zeros(shape, dtype=dtype, device=device)
            self._groups.append((group, places))
            assign_views(group, places)

    def reserve(self, num_slots: int) -> None:
        """Grows the buffers to hold at least `num_slots` slots, and then some, as this copies them."""
        old_capacity, self.capacity = self.capacity, num_slots + max(GROWTH, num_slots // 4)
        num_moved = max(self.nbytes * MOVED_SHARE, MOVED_BYTES)
        outgrown, self._groups = self._groups, []
        while outgrown:
            group, places = outgrown.pop()
            at_once = max(int(num_moved / group[0].nbytes), 1)
            for first in range(0, len(places), at_once):
                part = slice(first, first + at_once)
                grown = group.new_zeros(len(places[part]), *group.shape[1:3], self.capacity, group.shape[4])
                grown[:, :, :, :old_capacity] = group[part]
                self._groups.append((grown, places[part]))
                assign_views(grown, places[part])

    def move(self, nodes: torch.Tensor, starts: int | torch.Tensor) -> None:
        """Moves the entries `nodes` `(B, n)` behind the slots `starts` `(B, 1)` to the first slots from there on."""
        in_slots = isinstance(starts, int) and self.batch_size == 1
        known: dict[Any, Any] = {}
        for group, _ in self._groups:
            # Of all groups alike on a device, which may be many, the places are found once.
            kind = (group.device,) if in_slots else (group.device, *group.shape[:3])
            if kind not in known:
                find: Callable[..., Any] = _slots_to_move if in_slots else _entries_to_move
                known[kind] = find(group, nodes.to(group.device), starts)
            source, target = known[kind]
            if in_slots:
                group[:, :, :, target] = group.index_select(3, source)
            else:
                # Whole rows: several times as fast as gathering and scattering single numbers.
                entries = group.view(-1, group.shape[4])
                entries.index_copy_(0, target, entries.index_select(0, source))

    def clear_behind(self, lengths: Sequence[int]) -> None:
        """Makes zeros of what lies between the end of each row and that of the longest."""
        for group, _ in self._groups:
            for row, length in enumerate(lengths):
                group[:, row, :, length : max(lengths)] = 0

    def free(self) -> None:
        """Lets go of the memory."""
        self._groups.clear()


def first_slots(shape: Sequence[int], capacity: int, device: torch.device) -> torch.Tensor:
    """
    Returns `(*shape, 1)`: where the slots of each head begin in buffers `(*shape, capacity, head_dim)` that are
    flattened but for the last dimension. `shape` ends in `(B, heads)`.
    """
    return torch.arange(math.prod(shape), device=device).view(*shape, 1) * capacity


def assign_views(group: torch.Tensor, places: list[tuple[Any, str]]) -> None:
    for view, (layer, name) in zip(group, places, strict=True):
        setattr(layer, name, view)


def _slots_to_move(group: torch.Tensor, nodes: torch.Tensor, start: int) -> tuple[torch.Tensor, slice]:
    """Returns for a single row the slots of `nodes` `(1, n)`, and those that they go to."""
    return nodes[0] + start, slice(start, start + nodes.shape[1])


def _entries_to_move(
    group: torch.Tensor, nodes: torch.Tensor, starts: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns where entries come from and go to, in a group that is flattened but for the last dimension."""
    starts = starts if isinstance(starts, int) else starts.to(group.device)
    kept = torch.arange(nodes.shape[1], device=group.device)
    firsts = first_slots(group.shape[:3], group.shape[3], group.device)
    places_of_nodes, places_of_kept = starts + nodes, (starts + kept).expand_as(nodes)
    source, target = ((firsts + places[:, None]).flatten() for places in (places_of_nodes, places_of_kept))
    return source, target
