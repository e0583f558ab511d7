"""What layers of a target's own cache hold, and how what rejected drafts left in them is removed."""

from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer, DynamicSlidingWindowLayer


# Layers of an ordinary cache whose entries can be taken over. A dummy layer, in releases that know it, stands where a
# layer reads the keys and values of another one.
CONVERTIBLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))
# Layers that hold states, beside keys and values or alone.
STATE_LAYERS = (
    cache_utils.LinearAttentionLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
)
# Kinds whose classes transformers registers when the model that has them (DeepSeek V4, MiniMax M3) is imported.
COMPRESSED_KINDS = ("compressed_sparse_attention", "heavily_compressed_attention")
BLOCK_INDEX_KIND = "minimax_m3_sparse"
# What layers index their keys by, with the dimension of the tokens.
_INDICES = {"idx_keys": 2, "indexer_keys": 1, "indexer_position_ids": -1}


class StateSnapshot:
    """What a layer of a cache holds before a pass, as far as cropping does not bring it back."""

    def __init__(self, layer: Any):
        self.layer, self._num_entries = layer, num_entries(layer)
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
        if self._cropped:
            crop_to(self.layer, self._num_entries)


def is_croppable(layer: Any) -> bool:
    """Whether a layer can be cropped to fewer tokens."""
    kinds = (*CONVERTIBLE_LAYERS, cache_utils.DynamicIndexedLayer, DYNAMIC_LAYER_TYPE_MAPPING.get(BLOCK_INDEX_KIND))
    return type(layer) in kinds


def is_compressed(layer: Any) -> bool:
    """Whether a layer compresses what is before its window. All that it holds is replaced, never written in place."""
    return type(layer) in [DYNAMIC_LAYER_TYPE_MAPPING.get(kind) for kind in COMPRESSED_KINDS]


def can_roll_back(layer: Any) -> bool:
    """Whether drafts can be removed from a layer. Subclasses and other classes may hold more."""
    return is_croppable(layer) or type(layer) in STATE_LAYERS or is_compressed(layer)


def num_entries(layer: Any) -> int:
    """Returns how many tokens a layer has read; 0 where it does not count them."""
    return layer.get_seq_length() if isinstance(layer, DynamicLayer) else 0


def crop_to(layer: Any, num_tokens: int, keeps_past: bool = False) -> None:
    """Makes a croppable layer hold its first tokens; with `keeps_past` a sliding one all those before, too."""
    num_removed = max(num_entries(layer) - num_tokens, 0)
    if isinstance(layer, DynamicSlidingWindowLayer) and keeps_past:
        num_kept = layer.keys.shape[-2] - num_removed
        layer.keys, layer.values = layer.keys[:, :, :num_kept], layer.values[:, :, :num_kept]
        layer.cumulative_length -= num_removed
    elif isinstance(layer, DynamicSlidingWindowLayer):
        layer.crop(-num_removed)
    elif isinstance(layer, DynamicLayer):
        DynamicLayer.crop(layer, -num_removed)
    # An interrupted pass may have added tokens to the keys and not to their index.
    for name, dim in _INDICES.items():
        if (index := getattr(layer, name, None)) is not None and index.numel():
            setattr(layer, name, index.narrow(dim, 0, min(num_tokens, index.shape[dim])))


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy if it is a view of a larger one, which would be kept and saved with it."""
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)


def layers_of(cache: Any) -> Any:
    """Returns the layers of a cache."""
    return getattr(cache, "layers", [])  # code of others may return anything
