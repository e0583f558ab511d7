"""The target's own cache between passes over draft chains: cropped where it can be, else put back and caught up."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ..tree.verification import AcceptedPath
from .chain_layers import KeptLayer, KeptStates, crop_to, is_croppable, layers_of, num_entries, own_states
from .own_caches import as_argument, as_cache
from .verification_cache import VerificationCache


class ChainCache(VerificationCache):
    """
    The caller's cache, as the target's own causal passes write it. All rows advance by the same number of tokens.

    Layers of keys and values alone are cropped to what was accepted. Where a layer holds a state, what the cache held
    before the pass is put back after a rejection, and the accepted tokens are pending: they run again in front of the
    next pass's nodes.

    Args:
        cache (`DynamicCache`, or what else the target keeps): Holds the prompt.
        length: Entries of each row.
        batch_size: Number of rows, `B`.
    """

    def __init__(self, cache: Any, length: int, batch_size: int):
        self._cache = cache = as_cache(cache)
        self._length = length
        self._batch_size = batch_size
        if own_states(cache):
            _mark_unused_layers(cache)
        self._is_croppable = not own_states(cache) and all(is_croppable(layer) for layer in layers_of(cache))
        self._kept: list[KeptLayer | KeptStates] | None = None
        self._starts: list[int] = []  # entries of each layer before the newest pass
        self._pending: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None  # of the newest pass, until it is settled
        self._num_accepted = 0  # of these
        # Those that record the past until they are cropped after a pass; others do so because the caller asked.
        self._recording: list[DynamicSlidingWindowLayer] = []
        if self._is_croppable:
            self._record_past()

    @property
    def lengths(self) -> list[int]:
        return [self._length] * self._batch_size

    @property
    def argument(self) -> Any:
        """The caller's cache. It holds neither pending tokens nor, until the next pass, only accepted ones."""
        return as_argument(self._cache)

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
            self._kept = [*map(KeptLayer, layers_of(self._cache)), KeptStates(self._cache)]
        self._starts = [num_entries(layer) for layer in layers_of(self._cache)]
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

    def restore(self, caller_cache: Any) -> None:
        """Leaves in the caller's cache what was committed and is not pending. The end of this cache."""
        self._settle()
        self._kept = self._pending = None
        for layer in self._recording:
            layer.record_past = False

    def _settle(self) -> None:
        """Makes the cache hold what was accepted of the newest pass, or what it held before and the rest pending."""
        if self._tokens is None:
            return
        tokens, self._tokens = self._tokens, None
        if self._is_croppable:
            for layer, start in zip(layers_of(self._cache), self._starts, strict=True):
                if isinstance(layer, DynamicLayer):
                    crop_to(layer, start + self._num_accepted, keeps_past=layer not in self._recording)
            return
        if self._num_accepted == tokens.shape[1]:
            self._kept = self._pending = None
            return
        for kept in self._kept or []:
            kept.put_back()
        self._pending = tokens[:, : self._num_accepted] if self._num_accepted else None

    def _record_past(self) -> None:
        """Makes sliding layers keep what lies before their windows until they are cropped."""
        for layer in layers_of(self._cache):
            if isinstance(layer, DynamicSlidingWindowLayer) and not layer.record_past:
                layer.record_past = True
                self._recording.append(layer)


def _mark_unused_layers(cache: Cache) -> None:
    """
    Makes layers that hold nothing after a prompt, as their states lie beside them, ones that count no tokens. Masks
    are made as long as the first layer that counts them says, and that would be 0.
    """
    for place, layer in enumerate(layers_of(cache)):
        if type(layer) is DynamicLayer and num_entries(layer) == 0:
            cache.layers[place] = LinearAttentionLayer()
