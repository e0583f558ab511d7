"""The target's own cache between passes over draft chains: cropped where it can be, else put back and caught up."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ..tree.verification import AcceptedPath
from .cache_moving import CONVERTIBLE_LAYERS
from .verification_cache import VerificationCache


class ChainCache(VerificationCache):
    """
    The caller's cache, as the target's own causal passes write it. All rows advance by the same number of tokens.

    Layers of keys and values alone are cropped to what was accepted. Where a layer holds a state, what the cache held
    before the pass is put back after a rejection, and the accepted tokens are pending: they run again in front of the
    next pass's nodes.

    Args:
        cache (`DynamicCache`): Holds the prompt.
        length: Entries of each row.
        batch_size: Number of rows, `B`.
    """

    def __init__(self, cache: Cache, length: int, batch_size: int):
        self._cache = cache
        self._length = length
        self._batch_size = batch_size
        # Other layers, and subclasses of these, may keep more than keys and values.
        self._is_croppable = all(type(layer) in CONVERTIBLE_LAYERS for layer in cache.layers)
        self._kept: list[KeptLayer] | None = None
        self._starts: list[int] = []  # entries of each layer before the newest pass
        self._pending: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None  # of the newest pass, until it is settled
        self._num_accepted = 0  # of these
        if self._is_croppable:
            # A sliding layer then keeps what lies before its window until it is cropped.
            self._record_past(True)

    @property
    def lengths(self) -> list[int]:
        return [self._length] * self._batch_size

    @property
    def past_key_values(self) -> Cache:
        """The caller's cache. It holds neither pending tokens nor, until the next pass, only accepted ones."""
        return self._cache

    @property
    def num_pending(self) -> int:
        """Accepted tokens of each row that run again."""
        self._settle()
        return 0 if self._pending is None else self._pending.shape[1]

    def starts(self, device: torch.device) -> int:
        return self._length

    def attention_mask(
        self, visible: torch.Tensor, depths: torch.Tensor, dtype: torch.dtype, window: int | None = None
    ) -> None:
        """Returns `None`: a chain is seen by the target's own causal mask."""

    def begin_pass(self, nodes: torch.Tensor) -> torch.Tensor:
        """Prepares a pass over `nodes` `(B, n)`. Returns what it has to run: pending tokens, then the nodes."""
        self._settle()
        if not self._is_croppable and self._kept is None:
            self._kept = [KeptLayer(layer) for layer in self._cache.layers]
        self._starts = [_num_entries(layer) for layer in self._cache.layers]
        self._num_accepted = 0 if self._pending is None else self._pending.shape[1]
        self._tokens = nodes if self._pending is None else torch.cat((self._pending, nodes), dim=1)
        return self._tokens

    def commit(self, path: AcceptedPath) -> None:
        """Keeps as many nodes of the newest pass, from the root on, as the longest of the accepted lengths."""
        self._num_accepted += max(path.accepted_lengths)
        self._length += max(path.accepted_lengths)

    def truncate(self, num_removed: Sequence[int]) -> None:
        """Gives up the newest `max(num_removed)` entries, which must be of the newest pass."""
        if max(num_removed) > self._num_accepted:
            raise ValueError(f"The newest pass left {self._num_accepted} tokens, and {max(num_removed)} were to go.")
        self._num_accepted -= max(num_removed)
        self._length -= max(num_removed)

    def restore(self, past_key_values: Any) -> None:
        """Leaves in the caller's cache what was committed and is not pending. The end of this cache."""
        self._settle()
        self._kept = self._pending = None
        if self._is_croppable:
            self._record_past(False)

    def _settle(self) -> None:
        """Makes the cache hold what was accepted of the newest pass, or what it held before and the rest pending."""
        if self._tokens is None:
            return
        tokens, self._tokens = self._tokens, None
        if self._is_croppable:
            for layer, start in zip(self._cache.layers, self._starts, strict=True):
                if isinstance(layer, DynamicLayer):
                    layer.crop(min(start + self._num_accepted - _num_entries(layer), 0))
            return
        if self._num_accepted == tokens.shape[1]:
            self._kept = self._pending = None
            return
        for kept in self._kept or []:
            kept.put_back()
        self._pending = tokens[:, : self._num_accepted] if self._num_accepted else None

    def _record_past(self, record_past: bool) -> None:
        for layer in self._cache.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.record_past = record_past


class KeptLayer:
    """
    What a layer of a cache holds now. Keys and values that only grow are not copied, and those of a sliding window
    are never written in place, so that it is enough to hold on to them.

    Args:
        layer: Any layer of a cache.
    """

    def __init__(self, layer: Any):
        self.layer = layer
        self._num_entries = _num_entries(layer)
        self._grows = isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)
        self._fields = {
            name: value if _is_entries(layer, name) else _copy(value)
            for name, value in vars(layer).items()
            if not (self._grows and _is_entries(layer, name))
        }

    def put_back(self) -> None:
        """Makes the layer hold this again. May be called any number of times."""
        now = vars(self.layer)
        for name, value in self._fields.items():
            now[name] = value if _is_entries(self.layer, name) else _put_back(now[name], value)
        if self._grows and self.layer.keys is not None:
            self.layer.keys = self.layer.keys[..., : self._num_entries, :]
            self.layer.values = self.layer.values[..., : self._num_entries, :]


def _is_entries(layer: Any, name: str) -> bool:
    return isinstance(layer, DynamicLayer) and name in ("keys", "values")


def _num_entries(layer: Any) -> int:
    """Returns how many tokens a layer has read; 0 where it does not count them."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        return layer.cumulative_length
    keys = getattr(layer, "keys", None)
    return 0 if keys is None or keys.numel() == 0 else keys.shape[-2]


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
    return _copy(value)
