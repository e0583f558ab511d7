"""The layers of a target's own cache: which of them drafts can be taken back from, and how."""

from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from .cache_moving import CONVERTIBLE_LAYERS


STATE_LAYERS = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


# Kinds of layers whose classes transformers registers when the model that has them (DeepSeek V4, MiniMax M3) is
# imported.
COMPRESSED_KINDS = ("compressed_sparse_attention", "heavily_compressed_attention")
BLOCK_INDEX_KIND = "minimax_m3_sparse"


def can_be_taken_back(layer: Any) -> bool:
    """
    Whether it is known how drafts are taken back from a layer. Others, and subclasses of these, may keep more, and may
    do at the end of a window what trying a few tokens does not show.
    """
    return is_croppable(layer) or type(layer) in STATE_LAYERS or is_compressed(layer)


def is_croppable(layer: Any) -> bool:
    """Whether a layer can be cropped to fewer tokens."""
    return type(layer) in CONVERTIBLE_LAYERS or type(layer) is DynamicIndexedLayer or has_block_index(layer)


def has_block_index(layer: Any) -> bool:
    """Whether a layer has an index of its keys (MiniMax M3), from which blocks of them are chosen."""
    return type(layer) is cache_utils.DYNAMIC_LAYER_TYPE_MAPPING.get(BLOCK_INDEX_KIND)


def is_compressed(layer: Any) -> bool:
    """Whether a layer compresses what lies behind a window. All it holds is replaced, and never written in place."""
    return any(type(layer) is cache_utils.DYNAMIC_LAYER_TYPE_MAPPING.get(kind) for kind in COMPRESSED_KINDS)


def own_states(cache: Any) -> dict[str, Any]:
    """Returns what a cache itself holds tensors in, beside its layers (MiniMax: states of lightning attention)."""
    return {name: value for name, value in vars(cache).items() if name != "layers" and _holds_tensors(value)}


def layers_of(cache: Any) -> list[Any]:
    """Returns the layers of a cache; one that holds states alone may have none."""
    layers: list[Any] = getattr(cache, "layers", [])
    return layers


def num_entries(layer: Any) -> int:
    """Returns how many tokens a layer has read; 0 where it does not count them."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        return layer.cumulative_length
    keys = getattr(layer, "keys", None)
    return 0 if keys is None or keys.numel() == 0 else keys.shape[-2]


def crop_to(layer: Any, num_tokens: int, keeps_past: bool = False) -> None:
    """
    Makes a layer that can be cropped hold its first `num_tokens` tokens, also where a pass that was interrupted has
    added its tokens to the keys and not to the index. With `keeps_past` a sliding layer keeps what it holds of the
    tokens before its window.
    """
    num_removed = num_entries(layer) - num_tokens
    if has_block_index(layer):
        DynamicLayer.crop(layer, min(-num_removed, 0))
        if layer.idx_keys is not None:
            layer.idx_keys = layer.idx_keys[:, :, :num_tokens]
    elif type(layer) is DynamicIndexedLayer:
        DynamicLayer.crop(layer, min(-num_removed, 0))
        if layer.indexer_keys is not None and layer.indexer_keys.numel():
            layer.indexer_keys = layer.indexer_keys[:, :num_tokens]
        if getattr(layer, "indexer_position_ids", None) is not None:
            layer.indexer_position_ids = layer.indexer_position_ids[..., :num_tokens]
    elif keeps_past and isinstance(layer, DynamicSlidingWindowLayer):
        num_kept = layer.keys.shape[-2] - max(num_removed, 0)
        layer.keys, layer.values = layer.keys[:, :, :num_kept], layer.values[:, :, :num_kept]
        layer.cumulative_length -= max(num_removed, 0)
    else:
        layer.crop(min(-num_removed, 0))


class KeptLayer:
    """
    What a layer of a cache holds now. What only grows is not copied, and what is never written in place (keys and
    values of a sliding window, what is compressed) is held on to.

    Args:
        layer: Any layer of a cache.

    Attributes:
        held: What has to be put back, by its name in the layer.
    """

    def __init__(self, layer: Any):
        self.layer = layer
        self._num_entries = num_entries(layer)
        self._is_cropped = is_croppable(layer) and not isinstance(layer, DynamicSlidingWindowLayer)
        self._grows = isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)
        self._is_replaced = is_compressed(layer)
        self.held = {
            name: self._hold(name, value)
            for name, value in vars(layer).items()
            if not (self._is_cropped or (self._grows and _is_entries(layer, name)))
        }

    def _hold(self, name: str, value: Any) -> Any:
        if self._is_replaced:
            return dict(value) if isinstance(value, dict) else value
        return value if _is_entries(self.layer, name) else _copy(value)

    def put_back(self) -> None:
        """Makes the layer hold this again. May be called any number of times."""
        now = vars(self.layer)
        for name, value in self.held.items():
            is_held = self._is_replaced or _is_entries(self.layer, name)
            now[name] = self._hold(name, value) if is_held else _put_back(now[name], value)
        if self._is_cropped:
            crop_to(self.layer, self._num_entries)
        elif self._grows and self.layer.keys is not None:
            self.layer.keys = self.layer.keys[..., : self._num_entries, :]
            self.layer.values = self.layer.values[..., : self._num_entries, :]


class KeptStates:
    """
    What a cache itself holds now, beside its layers: a copy.

    Args:
        cache: Any cache.

    Attributes:
        held: What has to be put back, by its name in the cache.
    """

    def __init__(self, cache: Any):
        self.cache = cache
        self.held = _copy(own_states(cache))

    def put_back(self) -> None:
        """Makes the cache hold this again. May be called any number of times."""
        now = vars(self.cache)
        now.update(_put_back({name: now[name] for name in self.held}, self.held))


def _is_entries(layer: Any, name: str) -> bool:
    return isinstance(layer, DynamicLayer) and name in ("keys", "values")


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return any(map(_holds_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)


def _copy(value: Any) -> Any:
    """Returns a copy in memory of its own of a tensor, or of all tensors in a container."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return type(value)((name, _copy(item)) for name, item in value.items())
    return type(value)(map(_copy, value)) if type(value) in (list, tuple) else value


def _put_back(now: Any, value: Any) -> Any:
    """Returns `value` again, in the memory of `now` where that has its shape, as compiled functions may know it."""
    if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
        fits = (now.shape, now.dtype, now.device) == (value.shape, value.dtype, value.device)
        return now.copy_(value) if fits else value.clone()
    if isinstance(value, dict) and isinstance(now, dict):
        return type(value)((name, _put_back(now.get(name), item)) for name, item in value.items())
    if type(value) in (list, tuple) and type(now) is type(value) and len(now) == len(value):
        return type(value)(map(_put_back, now, value))
    return _copy(value)
