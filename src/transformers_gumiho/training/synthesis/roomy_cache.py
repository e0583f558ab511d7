"""A key-value cache with room in advance: with large batches, copying a growing one costs more than the target."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


# Slots that are added when a layer is full.
ROOM = 128


class RoomyLayer(DynamicLayer):
    """A full-attention layer whose `keys` and `values` are views of buffers with room for what follows."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Takes the dtype and device of these states."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds states `(B, heads, T, head_dim)`; returns all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.keys.shape[-2]
        stop = start + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < stop:
            self._buffers = (_with_room(self.keys, stop + ROOM), _with_room(self.values, stop + ROOM))
        keys, values = self._buffers
        keys[:, :, start:stop], values[:, :, start:stop] = key_states, value_states
        self.keys, self.values = keys[:, :, :stop], values[:, :, :stop]
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._buffers = None

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._buffers = None


def make_roomy_cache(config: PreTrainedConfig) -> DynamicCache:
    """Returns an empty cache for a target of this config, with room in its full-attention layers."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def attends_everywhere(cache: DynamicCache) -> bool:
    """Whether all layers see all tokens, so that it does not matter in which columns padding stands."""
    return bool(cache.layers) and all(type(layer) is RoomyLayer for layer in cache.layers)


def _with_room(states: torch.Tensor, num_slots: int) -> torch.Tensor:
    buffer = states.new_empty(*states.shape[:2], num_slots, states.shape[-1])
    buffer[:, :, : states.shape[-2]] = states
    return buffer
