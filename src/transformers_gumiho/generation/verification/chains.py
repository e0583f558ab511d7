"""
Verifying draft chains by the target's own causal pass, over its own cache. Between passes the cache is cropped where
it can be, else restored and replayed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from ...commands import UserValueError
from ..tree.draft_tree import DraftTree
from ..tree.uploads import upload
from ..tree.walk import Path
from .session import TargetOutput, TargetSession, text_positions
from .tree_cache import CONVERTIBLE_LAYERS


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

# Pending tokens make passes longer, which costs little while reading the weights takes longest. With more than this
# number of pending tokens per draft of a chain, one pass without drafts commits them. A cycle with a rejection commits
# no more tokens than it has drafts, so at least this many cycles come between two such passes.
PENDING_PER_DRAFT = 10


@dataclass
class TensorListCache:
    """Stands for a cache where a target takes and returns a list of tensors (RWKV), which it writes in place."""

    tensors: list[Any]


class ChainCache:
    """
    The caller's cache, as the target's own causal passes write it, with `length` entries of each of `batch_size` rows.
    All rows advance by the same number of tokens.

    Keys and values are cropped to the accepted tokens. Where a layer holds a state, a rejection restores what the
    cache held before the pass. The accepted tokens are then pending: the next pass runs them again before its nodes.
    """

    def __init__(self, cache: Any, length: int, batch_size: int):
        self._cache = cache = TensorListCache(cache) if isinstance(cache, list) else cache
        self._length = length
        self._batch_size = batch_size
        has_own_states = any(True for _ in tensors_in(vars(cache)))  # MiniMax keeps its beside the layers
        if has_own_states:
            _mark_unused_layers(cache)
        self._is_croppable = not has_own_states and all(map(is_croppable, _layers_of(cache)))
        self._snapshots: list[StateSnapshot] = []
        self._starts: list[int] = []  # entries of each layer before the newest pass
        self._pending: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None  # of the newest pass, until it is settled
        self._num_accepted = 0  # of these
        self._has_run = False  # whether the newest pass has run in all layers
        # Sliding layers that keep their past until they are cropped after a pass. Others do so for the caller.
        self._recording: list[DynamicSlidingWindowLayer] = []
        for layer in _layers_of(cache) if self._is_croppable else []:
            if isinstance(layer, DynamicSlidingWindowLayer) and not layer.record_past:
                layer.record_past = True
                self._recording.append(layer)

    @property
    def lengths(self) -> list[int]:
        """Committed entries of each row."""
        return [self._length] * self._batch_size

    @property
    def argument(self) -> Any:
        """The target's cache argument. It lacks pending tokens; rejected ones are removed before the next pass."""
        return self._cache.tensors if isinstance(self._cache, TensorListCache) else self._cache

    @property
    def num_pending(self) -> int:
        """Accepted tokens of each row that run again."""
        self._settle()
        return 0 if self._pending is None else self._pending.shape[1]

    def begin_pass(self, nodes: torch.Tensor) -> torch.Tensor:
        """Prepares a pass over `nodes` `(B, n)`. Returns the tokens to run: pending ones, then the nodes."""
        self._settle()
        if not self._is_croppable and not self._snapshots:
            self._snapshots = [StateSnapshot(owner) for owner in (*_layers_of(self._cache), self._cache)]
        self._starts = [num_entries(layer) for layer in _layers_of(self._cache)]
        self._num_accepted = 0 if self._pending is None else self._pending.shape[1]
        self._has_run = False
        self._tokens = nodes if self._pending is None else torch.cat((self._pending, nodes), dim=1)
        return self._tokens

    def end_pass(self) -> None:
        """Notes that the newest pass has run in all layers. An interrupted one is undone in all of them."""
        self._has_run = True

    def keep(self, num_accepted: int) -> None:
        """Keeps the first nodes of the newest pass, from the root on."""
        self.end_pass()
        self._num_accepted += num_accepted
        self._length += num_accepted

    def truncate(self, num_removed: Sequence[int]) -> None:
        """Removes the newest `max(num_removed)` entries, which must be of the newest pass."""
        number = max(num_removed)
        if number > self._num_accepted:
            raise UserValueError(f"Cannot remove {number} tokens: the newest pass left {self._num_accepted}.")
        self._num_accepted -= number
        self._length -= number

    def restore(self, cache: Any) -> None:
        """Leaves the committed entries that are not pending in the caller's cache. Ends the use of this one."""
        self._settle()
        self._snapshots, self._pending = [], None
        for layer in self._recording:
            layer.record_past = False

    def _settle(self) -> None:
        """Removes what the newest pass left and was not accepted."""
        if self._tokens is None:
            return
        tokens, self._tokens = self._tokens, None
        if self._is_croppable:
            for layer, start in zip(_layers_of(self._cache), self._starts, strict=True):
                if isinstance(layer, DynamicLayer):
                    crop_to(layer, start + self._num_accepted, keeps_past=layer not in self._recording)
        elif self._has_run and self._num_accepted == tokens.shape[1]:
            self._snapshots, self._pending = [], None
        else:
            for snapshot in self._snapshots:
                snapshot.restore()
            self._pending = tokens[:, : self._num_accepted] if self._num_accepted else None


@dataclass(eq=False)
class ChainSession(TargetSession):
    """A target that verifies chains: trees whose nodes are one path, in order. All rows advance together."""

    cache: ChainCache
    pad_token_id: int = 0
    _max_drafts: int = field(default=0, init=False)
    _padded: Sequence[bool] = field(default=(), init=False)

    def run_tree(self, tree: DraftTree, has_ended: Sequence[bool] = ()) -> TargetOutput:
        """Runs all nodes of a chain, root included, after the accepted tokens that the cache does not hold yet."""
        num_drafts = tree.tokens.shape[1] - 1
        self._max_drafts = max(self._max_drafts, num_drafts)
        # A pass without drafts needs no rollback.
        if num_drafts and self.cache.num_pending > PENDING_PER_DRAFT * self._max_drafts:
            self._catch_up(tree.tokens)
        return self._run(self._with_padding(tree.tokens.to(self.device), has_ended))

    def _keep_entries(self, path: Path) -> None:
        # Rows that have ended keep as many, which are padding there.
        self.cache.keep(max(path.accepted_lengths))

    def finish(self, num_tokens: Sequence[int], last_tokens: torch.Tensor, tree: DraftTree) -> None:
        """Leaves in the caller's cache the longest row's new tokens that plain decoding runs, for each row."""
        if not self.prompt.keeps_cache:
            return
        num_removed = self.cache.lengths[0] - self.prompt.length - max(num_tokens)
        self.cache.truncate([num_removed] * len(num_tokens))
        self._catch_up(tree.tokens)

    def _with_padding(self, tokens: torch.Tensor, has_ended: Sequence[bool]) -> torch.Tensor:
        """Puts in rows that have ended what plain decoding runs there: their last token once, then padding."""
        before, self._padded = self._padded or [False] * len(tokens), has_ended
        if not any(has_ended):
            return tokens
        num_kept = [int(not was) if ended else tokens.shape[1] for was, ended in zip(before, has_ended, strict=True)]
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        return tokens.masked_fill(columns >= upload(num_kept, tokens.device)[:, None], self.pad_token_id)

    def _catch_up(self, tokens: torch.Tensor) -> None:
        """Runs pending tokens alone, which commits them."""
        if self.cache.num_pending:
            self._run(tokens[:, :0].to(self.device))
            self.cache.end_pass()

    def _run(self, nodes: torch.Tensor) -> TargetOutput:
        start = self.cache.lengths[0] - self.prompt.length
        tokens = self.cache.begin_pass(nodes)
        num_tokens, num_nodes = tokens.shape[1], nodes.shape[1]
        offsets = torch.arange(start + num_nodes - num_tokens, start + num_nodes, device=self.device)
        position_ids = self._positions(offsets.expand(len(tokens), -1))
        inputs = self._image_mask(start + num_nodes)
        if self.model_kwargs.get("position_ids") is not None:
            inputs["position_ids"] = position_ids
        mask = self._attention_mask(start + num_nodes)
        outputs, captured = self._run_target(tokens, self.cache.argument, mask, max(num_nodes, 1), **inputs)
        hidden_states = outputs.hidden_states
        return TargetOutput(
            logits=outputs.logits[:, outputs.logits.shape[1] - num_nodes :],
            states=self.reader.collect(captured).newest(num_nodes),
            position_ids=text_positions(position_ids)[:, num_tokens - num_nodes :],
            hidden_states=hidden_states and tuple(states[:, num_tokens - num_nodes :] for states in hidden_states),
        )

    def _image_mask(self, num_new: int) -> dict[str, torch.Tensor]:
        """Returns which parts of an image each token of the text sees: new ones see those of the prompt's last."""
        column = self.model_kwargs.get("cross_attention_mask")
        if column is None:
            return {}
        # Releases before 5.24 read the rows of a pass by their place in the text.
        return {"cross_attention_mask": column.expand(-1, self.prompt.length + num_new, -1, -1)}

    def _attention_mask(self, num_new: int) -> torch.Tensor | None:
        """Returns the mask as plain decoding extends it by `num_new` tokens, `None` where the caller's has none."""
        if self.model_kwargs.get("attention_mask") is None:
            return None
        size = len(self.cache.lengths), self.prompt.length + num_new
        mask = torch.ones(size, dtype=torch.long, device=self.device)
        if self.prompt.mask is not None:
            mask[:, : self.prompt.length] = self.prompt.mask
        return mask


class StateSnapshot:
    """The state of a layer of a cache, or of the cache itself beside its layers, in attributes `held` by name."""

    def __init__(self, owner: Any):
        self.owner = owner
        self._num_entries = num_entries(owner)
        is_sliding = isinstance(owner, DynamicSlidingWindowLayer)
        self._is_cropped = is_croppable(owner) and not is_sliding
        self._grows = isinstance(owner, DynamicLayer) and not is_sliding
        every, entries = set(vars(owner)), {"keys", "values"}
        # What only grows is cropped.
        cropped = every if self._is_cropped else {"layers"} | (entries if self._grows else set())
        # The entries of a window, and compressed ones, are replaced, never written in place: a reference holds them.
        self._referenced = every if is_compressed(owner) else entries if isinstance(owner, DynamicLayer) else set()
        self.held = {name: self._hold(name, vars(owner)[name]) for name in every - cropped}

    def _hold(self, name: str, value: Any) -> Any:
        if name not in self._referenced:
            return _copied(value)
        return dict(value) if isinstance(value, dict) else value

    def restore(self) -> None:
        """Restores the state. It can be called again after later passes."""
        now = vars(self.owner)
        for name, value in self.held.items():
            now[name] = self._hold(name, value) if name in self._referenced else _copied(value, now[name])
        if self._is_cropped:
            crop_to(self.owner, self._num_entries)
        elif self._grows and self.owner.keys is not None:
            self.owner.keys = self.owner.keys[..., : self._num_entries, :]
            self.owner.values = self.owner.values[..., : self._num_entries, :]


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


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def held_tensors(cache: Any) -> list[torch.Tensor]:
    """Returns all tensors that a target's cache holds, in its layers and beside them."""
    return [
        tensor for owner in (cache, *_layers_of(cache)) for tensor in tensors_in(getattr(owner, "__dict__", owner))
    ]


def _layers_of(cache: Any) -> list[Any]:
    layers: list[Any] = getattr(cache, "layers", [])  # one that holds states alone may have none
    return layers


def _mark_unused_layers(cache: Any) -> None:
    """Replaces layers that are empty after the prefill, as their states are beside them."""
    # The first layer that counts tokens determines the length of masks, and that would be 0.
    for index, layer in enumerate(_layers_of(cache)):
        if type(layer) is DynamicLayer and num_entries(layer) == 0:
            cache.layers[index] = LinearAttentionLayer()


def _copied(value: Any, into: Any = None) -> Any:
    """Returns a copy of a tensor or of nested ones, in the memory of `into`, which compiled functions may know."""
    if isinstance(value, torch.Tensor):
        known = [getattr(into, name, None) for name in ("shape", "dtype", "device")]
        return into.copy_(value) if known == [value.shape, value.dtype, value.device] else value.clone()
    if isinstance(value, dict):
        items = into if isinstance(into, dict) else {}
        return type(value)((name, _copied(item, items.get(name))) for name, item in value.items())
    if type(value) in (list, tuple):
        is_alike = type(into) is type(value) and len(into) == len(value)
        return type(value)(map(_copied, value, into if is_alike else [None] * len(value)))
    return value
