"""What layers of a target's own cache hold, and how what rejected drafts left in them is removed."""

from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)


# Layers of an ordinary cache whose entries can be taken over. Releases of transformers that know a dummy layer put it
# where a layer reads the keys and values of another one; earlier ones leave such layers out.
CONVERTIBLE_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    *([cache_utils.DummyLayer] if hasattr(cache_utils, "DummyLayer") else []),
)
# Layers that hold states, beside keys and values or alone.
STATE_LAYERS = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
# Kinds of layers whose classes transformers registers when the model that has them (DeepSeek V4, MiniMax M3) is
# imported.
COMPRESSED_KINDS = ("compressed_sparse_attention", "heavily_compressed_attention")
BLOCK_INDEX_KIND = "minimax_m3_sparse"
# What layers index their keys by, with the dimension of the tokens.
_INDICES = {"idx_keys": 2, "indexer_keys": 1, "indexer_position_ids": -1}


class StateSnapshot:
    """What a layer of a cache holds before a pass, as far as cropping does not bring it back."""

    def __init__(self, layer: Any):
        self.layer = layer
        self._num_entries = num_entries(layer)
        names, entries = set(vars(layer)), {"keys", "values"}
        grows = isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)
        # 1. What only grows is cropped: all that the layer holds, or its keys and values beside a state.
        self._cropped = (names if is_croppable(layer) else entries) if grows else set()
        # 2. A reference holds what is replaced, and never written in place: the entries of a window, compressed ones.
        self._referenced = names if is_compressed(layer) else entries
        # 3. States are copied.
        self._held = {name: self._hold(name, vars(layer)[name]) for name in names - self._cropped}

    def _hold(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._hold(name, item) for key, item in value.items()}
        return value.clone() if isinstance(value, torch.Tensor) and name not in self._referenced else value

    def restore(self) -> None:
        """Restores the layer. It can be called again after later passes."""
        vars(self.layer).update({name: self._hold(name, value) for name, value in self._held.items()})
        if is_croppable(self.layer) and self._cropped:
            crop_to(self.layer, self._num_entries)
        elif self._cropped and self.layer.keys is not None:
            self.layer.keys = self.layer.keys[..., : self._num_entries, :]
            self.layer.values = self.layer.values[..., : self._num_entries, :]


def can_roll_back(layer: Any) -> bool:
    """Whether drafts can be removed from a layer."""
    # Other classes and subclasses may hold more, and a trial of a few tokens does not reach the end of a window.
    return is_croppable(layer) or type(layer) in STATE_LAYERS or is_compressed(layer)


def is_croppable(layer: Any) -> bool:
    """Whether a layer can be cropped to fewer tokens."""
    kinds = (*CONVERTIBLE_LAYERS, DynamicIndexedLayer, DYNAMIC_LAYER_TYPE_MAPPING.get(BLOCK_INDEX_KIND))
    return type(layer) in kinds


def is_compressed(layer: Any) -> bool:
    """Whether a layer compresses what is before its window. All that it holds is replaced, never written in place."""
    return type(layer) in [DYNAMIC_LAYER_TYPE_MAPPING.get(kind) for kind in COMPRESSED_KINDS]


def num_entries(layer: Any) -> int:
    """Returns how many tokens a layer has read; 0 where it does not count them."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        return layer.cumulative_length
    keys = getattr(layer, "keys", None)
    return 0 if keys is None or keys.numel() == 0 else keys.shape[-2]


def crop_to(layer: Any, num_tokens: int, keeps_past: bool = False) -> None:
    """Makes a croppable layer hold its first tokens; with `keeps_past` a sliding one all those before, too."""
    num_removed = max(num_entries(layer) - num_tokens, 0)
    if not isinstance(layer, DynamicSlidingWindowLayer):
        if isinstance(layer, DynamicLayer):
            DynamicLayer.crop(layer, -num_removed)
        # An interrupted pass may have added tokens to the keys and not to their index.
        for name, dim in _INDICES.items():
            if (index := getattr(layer, name, None)) is not None and index.numel():
                setattr(layer, name, index.narrow(dim, 0, min(num_tokens, index.shape[dim])))
    elif keeps_past:
        num_kept = layer.keys.shape[-2] - num_removed
        layer.keys, layer.values = layer.keys[:, :, :num_kept], layer.values[:, :, :num_kept]
        layer.cumulative_length -= num_removed
    else:
        layer.crop(-num_removed)


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy if it is a view of a larger one, which could not be saved by itself."""
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)


def layers_of(cache: Any) -> list[Any]:
    """Returns the layers of a cache."""
    layers: list[Any] = getattr(cache, "layers", [])  # code of others may return anything
    return layers
