"""
Verifying draft chains by the target's own causal pass, over its own cache. Between passes the cache is cropped where
it can be, else restored and replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..tree.draft_tree import DraftTree
from ..tree.uploads import upload
from ..tree.walk import Path
from .mixers import chunk_length
from .rollback import StateSnapshot, crop_to, is_croppable, layers_of, num_entries, owned
from .session import TargetOutput, TargetSession, text_positions


# Pending tokens make passes longer, which costs little while reading the weights takes longest. With more than this
# number of pending tokens per draft of a chain, one pass without drafts commits them. A cycle with a rejection commits
# no more tokens than it has drafts, so at least this many cycles come between two such passes.
PENDING_PER_DRAFT = 10


class ChainCache:
    """
    The caller's cache, as the target's own causal passes write it, with `length` entries of each of `batch_size` rows.
    All rows advance by the same number of tokens.

    Keys and values are cropped to the accepted tokens. Where a layer holds a state, a rejection restores what the
    cache held before the pass. The accepted tokens are then pending: the next pass runs them again before its nodes.
    `is_cropped` says whether no layer holds one. Between passes `target_cache` lacks pending tokens, and may hold
    rejected ones.
    """

    def __init__(self, cache: Any, length: int, batch_size: int):
        self.target_cache = cache
        self._length = length
        self._batch_size = batch_size
        self.is_cropped = all(map(is_croppable, layers_of(cache)))
        self._snapshots: list[StateSnapshot] = []
        self._starts: list[int] = []  # entries of each layer before the newest pass
        self._pending: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None  # of the newest pass, until it is settled
        self._num_accepted = 0  # of these
        self._has_run = False  # whether the newest pass has run in all layers
        # Sliding layers that keep their past until they are cropped after a pass. Others do so for the caller.
        self._recording: list[DynamicSlidingWindowLayer] = []
        for layer in layers_of(cache) if self.is_cropped else []:
            if isinstance(layer, DynamicSlidingWindowLayer) and not layer.record_past:
                layer.record_past = True
                self._recording.append(layer)

    states = None  # of branches, which it cannot hold
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
        if not self.is_cropped and not self._snapshots:
            self._snapshots = list(map(StateSnapshot, layers_of(self.target_cache)))
        self._starts = [num_entries(layer) for layer in layers_of(self.target_cache)]
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
        self._num_accepted -= number
        self._length -= number

    def restore(self, cache: Any) -> None:
        """Leaves the committed entries that are not pending in the caller's cache. Ends the use of this one."""
        self._settle()
        self._snapshots, self._pending = [], None
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
    _max_drafts: int = field(default=0, init=False)
    _padded: Sequence[bool] = field(default=(), init=False)

    def tokens_computed(self, num_drafts: int) -> float:
        # 1. Pending tokens run with the drafts, on average half of the most that wait.
        num_run = num_drafts if self.cache.is_cropped else num_drafts * (1 + PENDING_PER_DRAFT / 2)
        # 2. What transformers computes without kernels is padded to chunks.
        return max(num_run, chunk_length(self.model.get_decoder()))

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

    def finish(self, num_tokens: Sequence[int], new_tokens: torch.Tensor, tree: DraftTree) -> None:
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
        outputs, captured = self._run_target(tokens, self.cache.target_cache, mask, max(num_nodes, 1), **inputs)
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
