"""Where the entries of a cache for draft trees go: right behind each row's text, or in passes of fixed shapes."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from ..tree.attention_masks import block_attention_mask, slot_attention_mask
from ..tree.verification import AcceptedPath
from ..uploads import upload
from .cache_buffers import CacheBuffers, first_slots


class CacheSlots(ABC):
    """
    The slots of a cache: which of them are committed, what a pass writes and sees, and how a path is kept.

    Attributes:
        buffers: The keys and values.
        lengths: Committed slots of each row.
        num_pending: Uncommitted slots behind the committed ones that the next pass writes after.
        context_mask (`(B, T)`, bool, *optional*): False at committed slots that nobody sees (padding). All
            slots behind them are seen.
    """

    def __init__(self, buffers: CacheBuffers, lengths: list[int], context_mask: torch.Tensor | None):
        self.buffers = buffers
        self.lengths = lengths
        self.num_pending = 0
        self.context_mask = context_mask

    @abstractmethod
    def starts(self, device: torch.device) -> int | torch.Tensor:
        """Returns the committed slots, `(B, 1)` on `device`; one number where all rows are known to be alike."""

    @abstractmethod
    def sequence_length(self) -> Any:
        """Returns the slots of the longest row, pending ones included: a number, or a tensor `()`."""

    @abstractmethod
    def num_seen(self, query_length: int) -> int:
        """Returns how many slots a pass over so many new entries sees."""

    @abstractmethod
    def write(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Writes the new entries `(B, heads, n, head_dim)` of a layer behind the committed and pending ones; returns the
        slots that the pass sees.
        """

    @abstractmethod
    def attention_mask(
        self, visible: torch.Tensor, depths: torch.Tensor, dtype: torch.dtype, window: int | None
    ) -> torch.Tensor:
        """Returns the mask of a block of new entries; see [`block_attention_mask`]."""

    def hides_nothing(self, num_new: int, window: int | None) -> bool:
        """See [`VerificationCache`]."""
        return False

    @abstractmethod
    def keep(self, path: AcceptedPath) -> None:
        """Moves the entries of the accepted nodes behind the committed ones, and commits them."""

    @abstractmethod
    def advance(self, accepted_lengths: Any) -> None:
        """Commits the first of the newest entries: as many in each row as the numbers say."""

    @abstractmethod
    def set_lengths(self, lengths: list[int]) -> None:
        """Sets how many slots of each row are committed; what lies behind them is given up."""


class GrowingSlots(CacheSlots):
    """Passes see the slots up to the newest entry of the longest row, and outgrown buffers are made larger."""

    def __init__(self, buffers: CacheBuffers, lengths: list[int], context_mask: torch.Tensor | None = None):
        super().__init__(buffers, lengths, context_mask)
        # What every layer asks for again until the number of slots changes.
        self._starts: dict[torch.device, torch.Tensor] = {}
        self._new_entries: dict[tuple[torch.device, int, int, int], torch.Tensor] = {}

    @property
    def is_uniform(self) -> bool:
        """Whether all rows hold the same number of committed slots."""
        return len(self.lengths) == 1 or min(self.lengths) == max(self.lengths)

    def starts(self, device: torch.device) -> int | torch.Tensor:
        return self.lengths[0] if self.is_uniform else self._starts_of_rows(device)

    def sequence_length(self) -> int:
        return max(self.lengths) + self.num_pending

    def num_seen(self, query_length: int) -> int:
        return self.sequence_length() + query_length

    def write(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_new = keys.shape[2]
        stop = self.num_seen(num_new)
        if stop > self.buffers.capacity:
            self.buffers.reserve(stop)
            self._new_entries.clear()
        for buffer, states in ((layer.keys, keys), (layer.values, values)):
            if self.is_uniform:
                buffer[:, :, stop - num_new : stop] = states
            else:
                index = self._index_of_new(states.shape[1], num_new, buffer.device)
                buffer.view(-1, buffer.shape[3]).index_copy_(0, index, states.reshape(-1, states.shape[3]))
        return layer.keys[:, :, :stop], layer.values[:, :, :stop]

    def attention_mask(
        self, visible: torch.Tensor, depths: torch.Tensor, dtype: torch.dtype, window: int | None
    ) -> torch.Tensor:
        self.context_mask = _extended(self.context_mask, max(self.lengths))
        return block_attention_mask(visible, depths, self.lengths, dtype, self.context_mask, window)

    def hides_nothing(self, num_new: int, window: int | None) -> bool:
        is_alone = num_new == 1 and self.num_pending == 0 and self.is_uniform
        return is_alone and self.context_mask is None and (window is None or max(self.lengths) < window)

    def keep(self, path: AcceptedPath) -> None:
        longest = max(path.accepted_lengths)
        # The root is the first entry and stays where it is.
        if longest > 1:
            self.buffers.move(path.nodes[:, :longest], self.starts(path.nodes.device))
        self.advance(path.accepted_lengths)

    def advance(self, accepted_lengths: list[int]) -> None:
        self.set_lengths([length + number for length, number in zip(self.lengths, accepted_lengths, strict=True)])

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.num_pending = 0
        self._starts.clear()
        self._new_entries.clear()

    def _starts_of_rows(self, device: torch.device) -> torch.Tensor:
        if device not in self._starts:
            self._starts[device] = upload(self.lengths, device)[:, None]
        return self._starts[device]

    def _index_of_new(self, num_heads: int, num_new: int, device: torch.device) -> torch.Tensor:
        """
        Returns `(B * num_heads * num_new,)`: where new entries go in a layer's buffer flattened to
        `(B * num_heads * capacity, head_dim)`.
        """
        key = device, num_heads, num_new, self.num_pending
        if key not in self._new_entries:
            slots = self._starts_of_rows(device) + self.num_pending + torch.arange(num_new, device=device)
            firsts = first_slots((len(self.lengths), num_heads), self.buffers.capacity, device)
            self._new_entries[key] = (firsts + slots[:, None]).flatten()
        return self._new_entries[key]


class FixedSlots(CacheSlots):
    """
    Passes see all slots and read no number from the host, so that they can be compiled once. The buffers must have
    room for whatever follows: they grow no more.

    Args:
        slots: What the cache has held until now.
        device: Where the number of committed slots is kept.
    """

    def __init__(self, slots: CacheSlots, device: torch.device):
        buffers = slots.buffers
        super().__init__(buffers, slots.lengths, _extended(slots.context_mask, buffers.capacity))
        self._starts = upload(slots.lengths, device)[:, None]
        if buffers.memory is not None:
            self._starts = buffers.memory.copy(self._starts)

    def starts(self, device: torch.device) -> torch.Tensor:
        return self._starts.to(device)

    def sequence_length(self) -> torch.Tensor:
        return self._starts.max() + self.num_pending

    def num_seen(self, query_length: int) -> int:
        return self.buffers.capacity

    def write(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = torch.arange(keys.shape[2], device=keys.device)
        slots = self.starts(keys.device) + (self.num_pending + new)
        for buffer, states in ((layer.keys, keys), (layer.values, values)):
            if slots.shape[0] == 1:
                buffer.index_copy_(2, slots[0], states)
            else:
                rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
                buffer.transpose(1, 2).index_put_((rows, slots), states.transpose(1, 2))
        return layer.keys, layer.values

    def attention_mask(
        self, visible: torch.Tensor, depths: torch.Tensor, dtype: torch.dtype, window: int | None
    ) -> torch.Tensor:
        num_slots = self.buffers.capacity
        return slot_attention_mask(visible, depths, self._starts, num_slots, dtype, self.context_mask, window)

    def keep(self, path: AcceptedPath) -> None:
        # As many nodes every time; what is behind the accepted ones is given up again.
        self.buffers.move(path.nodes, self._starts)
        lengths = zip(self.lengths, path.accepted_lengths, strict=True)
        self.set_lengths([length + number for length, number in lengths])

    def advance(self, accepted_lengths: torch.Tensor) -> None:
        """Only the device knows the number of committed slots from here on; `lengths` stays as it was."""
        self._starts.add_(accepted_lengths[:, None])
        self.num_pending = 0

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.num_pending = 0
        self._starts.copy_(upload(lengths, self._starts.device)[:, None])


def _extended(context_mask: torch.Tensor | None, num_slots: int) -> torch.Tensor | None:
    """Makes a mask cover so many slots at least: those behind it are seen."""
    if context_mask is None or context_mask.shape[1] >= num_slots:
        return context_mask
    return torch.nn.functional.pad(context_mask, (0, num_slots - context_mask.shape[1]), value=True)
