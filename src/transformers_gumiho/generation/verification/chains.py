"""
Verifying draft chains by the target's own causal pass, over its own cache. Between passes the cache is cropped where
it can be, else restored and replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..tree.draft_tree import DraftTree
from ..tree.uploads import upload
from ..tree.walk import Path
from .mixers import chunk_length
from .rollback import StateSnapshot, crop_to, is_croppable, layers_of, num_entries, owned
from .session import TargetOutput, TargetSession, text_positions


# With more pending tokens than this per draft of a chain, one pass without drafts commits them. A cycle with a
# rejection commits no more tokens than it has drafts, so at least this many cycles come between two such passes.
PENDING_PER_DRAFT = 10


class ChainCache:
    """
    The caller's cache, with `length` entries of each of `batch_size` rows, which advance together.

    Keys and values are cropped to the accepted tokens. Where a layer holds a state, `is_cropped` is false: a rejection
    restores what the cache held before the pass. The accepted tokens are then pending: the next pass runs them again
    before its nodes. Between passes `target_cache` lacks pending tokens, and may hold rejected ones.
    """

    def __init__(self, cache: Any, length: int, batch_size: int):
        self.target_cache, self._length, self._batch_size = cache, length, batch_size
        self.is_cropped = all(map(is_croppable, layers_of(cache)))
        self._snapshots: list[StateSnapshot] = []
        self._starts: list[int] = []  # entries of each layer before the newest pass
        self._pending: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None  # of the newest pass, until it is settled
        self._num_accepted = 0  # of these
        self._has_run = False  # whether the newest pass has run in all layers
        # Sliding layers that keep their past until they are cropped after a pass. Others do so for the caller.
        sliding = [layer for layer in layers_of(cache) if isinstance(layer, DynamicSlidingWindowLayer)]
        self._recording = [layer for layer in sliding if self.is_cropped and not layer.record_past]
        for layer in self._recording:
            layer.record_past = True

    min_length = 0

    @property
    def lengths(self) -> list[int]:
        """Committed entries of each row."""
        return [self._length] * self._batch_size

    @property
    def num_pending(self) -> int:
        """Accepted tokens of each row that run again."""
        self._settle()
        return 0 if self._pending is None else self._pending.shape[1]

    def begin_pass(self, nodes: torch.Tensor) -> torch.Tensor:
        """Prepares a pass over `nodes` `(B, n)`. Returns the tokens to run: pending ones, then the nodes."""
        self._settle()
        layers = layers_of(self.target_cache)
        if not self.is_cropped and not self._snapshots:
            self._snapshots = list(map(StateSnapshot, layers))
        self._starts = list(map(num_entries, layers))
        self._tokens = nodes if self._pending is None else torch.cat((self._pending, nodes), dim=1)
        self._num_accepted, self._has_run = self._tokens.shape[1] - nodes.shape[1], False
        return self._tokens

    def keep(self, num_accepted: int) -> None:
        """Keeps the first nodes of the newest pass, which has run in all layers. An interrupted one is undone."""
        self._has_run = True
        self._num_accepted += num_accepted
        self._length += num_accepted

    def truncate(self, num_removed: Sequence[int]) -> None:
        """Removes the newest `max(num_removed)` entries, which must be of the newest pass."""
        number = max(num_removed)
        self._num_accepted -= number
        self._length -= number

    def restore(self, cache: Any) -> None:
        """Leaves the committed entries that are not pending in the caller's cache. Ends the use of this one."""
        self._settle()
        for layer in self._recording:
            layer.record_past = False
        for layer in layers_of(self.target_cache):
            if isinstance(layer, DynamicLayer) and layer.keys is not None:
                layer.keys, layer.values = owned(layer.keys), owned(layer.values)

    def _settle(self) -> None:
        """Removes what the newest pass left and was not accepted."""
        if self._tokens is None:
            return
        tokens, self._tokens = self._tokens, None
        if self.is_cropped:
            for layer, start in zip(layers_of(self.target_cache), self._starts, strict=True):
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
    _padded: Sequence[bool] = field(default=(), init=False)

    def tokens_computed(self, num_drafts: int) -> float:
        # 1. Pending tokens run with the drafts, on average half of the most that wait.
        num_run = num_drafts if self.cache.is_cropped else num_drafts * (1 + PENDING_PER_DRAFT / 2)
        # 2. What transformers computes without kernels is padded to chunks.
        return max(num_run, chunk_length(self.model.get_decoder()))

    def run_tree(self, tree: DraftTree, has_ended: Sequence[bool] = ()) -> TargetOutput:
        """Runs all nodes of a chain, root included, after the accepted tokens that the cache does not hold yet."""
        # A pass without drafts needs no rollback.
        has_drafts = tree.tokens.shape[1] > 1
        if has_drafts and self.cache.num_pending > PENDING_PER_DRAFT * (self.max_path - 1):
            self._catch_up(tree.tokens)
        return self._run(self._with_padding(tree.tokens.to(self.device), has_ended))

    def _keep_entries(self, path: Path) -> None:
        # Rows that have ended keep as many, which are padding there.
        self.cache.keep(max(path.accepted_lengths))

    def finish(self, num_tokens: Sequence[int], new_tokens: torch.Tensor, tree: DraftTree) -> None:
        """Leaves in the caller's cache the longest row's new tokens that plain decoding runs, for each row."""
        if self.prompt.keeps_cache:
            num_removed = self.cache.lengths[0] - self.prompt.length - max(num_tokens)
            self.cache.truncate([num_removed])
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
            self.cache.keep(0)

    def _run(self, nodes: torch.Tensor) -> TargetOutput:
        start = self.cache.lengths[0] - self.prompt.length
        tokens = self.cache.begin_pass(nodes)
        num_tokens, num_nodes = tokens.shape[1], nodes.shape[1]
        offsets = torch.arange(start + num_nodes - num_tokens, start + num_nodes, device=self.device)
        position_ids = self._positions(offsets.expand(len(tokens), -1))
        takes_positions = self.model_kwargs.get("position_ids") is not None
        inputs = {"position_ids": position_ids} if takes_positions else {}
        if (column := self.model_kwargs.get("cross_attention_mask")) is not None:
            # New tokens see the parts of an image that the prompt's last one sees. Releases before 5.24 read the rows
            # of a pass by their place in the text.
            length = self.prompt.length + start + num_nodes
            inputs["cross_attention_mask"] = column.expand(-1, length, -1, -1)
        mask = self._attention_mask(start + num_nodes)
        outputs, captured = self._run_target(tokens, self.cache.target_cache, mask, max(num_nodes, 1), **inputs)
        hidden_states = outputs.hidden_states
        return TargetOutput(
            outputs.logits[:, outputs.logits.shape[1] - num_nodes :],
            self.reader.collect(captured).newest(num_nodes),
            text_positions(position_ids)[:, num_tokens - num_nodes :],
            hidden_states and tuple(states[:, num_tokens - num_nodes :] for states in hidden_states),
        )

    def _attention_mask(self, num_new: int) -> torch.Tensor | None:
        """Returns the mask as plain decoding extends it by `num_new` tokens, `None` where the caller's has none."""
        if self.model_kwargs.get("attention_mask") is None:
            return None
        length, mask = self.prompt.length, self.prompt.mask
        if mask is None:
            mask = torch.ones(len(self.cache.lengths), length, dtype=torch.bool, device=self.device)
        return pad(mask.long(), (0, num_new), value=1)
