"""Verifying draft chains by the target's own causal pass, over its own cache."""

from collections.abc import Sequence

import torch

from ..tree.draft_tree import DraftTree
from ..tree.walk import AcceptedPath
from ..uploads import upload
from .chain_cache import ChainCache
from .session import TargetOutput, TargetSession, text_positions


# Pending tokens make passes longer, which costs little while reading the weights takes longest. With more than this
# number of pending tokens per draft of a chain, one pass without drafts commits them. A cycle with a rejection commits
# no more tokens than it has drafts, so at least this many cycles come between two such passes.
PENDING_PER_DRAFT = 10


class ChainSession(TargetSession):
    """A target that verifies chains: trees whose nodes are one path, in order. All rows advance together."""

    cache: ChainCache
    pad_token_id: int = 0
    _most_drafts: int = 0
    _padded: Sequence[bool] = ()

    def run_tree(self, tree: DraftTree, has_ended: Sequence[bool] = ()) -> TargetOutput:
        """Runs all nodes of a chain, root included, behind the accepted tokens that the cache does not hold yet."""
        num_drafts = tree.tokens.shape[1] - 1
        self._most_drafts = max(self._most_drafts, num_drafts)
        # A pass without drafts needs no rollback.
        if num_drafts and self.cache.num_pending > PENDING_PER_DRAFT * self._most_drafts:
            self._catch_up(tree.tokens)
        return self._run(self._with_padding(tree.tokens.to(self.device), has_ended))

    def keep(self, path: AcceptedPath) -> None:
        """Keeps the accepted nodes of the newest pass. Rows that have ended keep as many, which are padding there."""
        self.cache.keep_path(path)

    def finish(self, num_tokens: Sequence[int], last_tokens: torch.Tensor, tree: DraftTree) -> None:
        """Leaves in the cache what plain decoding does: the longest row's new tokens that it has run, for each row."""
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
        model_inputs = self.model.prepare_inputs_for_generation(
            tokens,
            **self._node_kwargs(num_tokens) | self._image_mask(start + num_nodes),
            **{self.traits.cache_argument: self.cache.argument},
            attention_mask=self._attention_mask(start + num_nodes),
            **({} if self.model_kwargs.get("position_ids") is None else {"position_ids": position_ids}),
        )
        if "logits_to_keep" in model_inputs:  # some models put in their own
            model_inputs["logits_to_keep"] = max(num_nodes, 1)
        outputs, captured = self._run_target(model_inputs, num_tokens)
        hidden_states = outputs.hidden_states
        return TargetOutput(
            logits=outputs.logits[:, outputs.logits.shape[1] - num_nodes :],
            states=self.reader.collect(captured).newest(num_nodes),
            position_ids=text_positions(position_ids)[:, num_tokens - num_nodes :],
            hidden_states=hidden_states and tuple(states[:, num_tokens - num_nodes :] for states in hidden_states),
        )

    def _image_mask(self, num_new: int) -> dict[str, torch.Tensor]:
        """Returns which parts of an image each token of the text sees, as plain decoding extends it."""
        mask = self.model_kwargs.get("cross_attention_mask")
        if mask is None:
            return {}
        num_missing = self.prompt.length + num_new - mask.shape[1]
        return {"cross_attention_mask": torch.cat((mask, mask[:, -1:].expand(-1, num_missing, -1, -1)), dim=1)}

    def _attention_mask(self, num_new: int) -> torch.Tensor | None:
        """Returns the mask as plain decoding extends it by `num_new` tokens, `None` where the caller's has none."""
        if self.model_kwargs.get("attention_mask") is None:
            return None
        mask, length = self.prompt.mask, self.prompt.length
        new = torch.ones(len(self.cache.lengths), num_new, dtype=torch.long, device=self.device)
        return torch.cat((new.new_ones(len(new), length) if mask is None else mask.long(), new), dim=1)
