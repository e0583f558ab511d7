"""Drafting with a block drafter: one pass for all depths, of whose tokens the best combinations are the tree."""

from typing import Any

import torch
from torch.nn.functional import embedding, linear

from ...model.decoding_settings import DraftingSettings
from ...model.modeling_gumiho import GumihoModel
from ..tree.draft_tree import DraftLevel
from .candidate_generator import GumihoCandidateGenerator
from .drafter import NewestTokens
from .transitions import condition


class MarkovTransitions:
    """
    What the token above a draft adds to the draft's logit by the Markov head of DSpark, for the `K` tokens that may be
    drafted, whose ids are `token_ids` `(K,)`. At depth 1 the token above is known, so that its term is added for all
    tokens ([`of_roots`]). Below, it is added for pairs of candidates alone ([`apply`]).
    """

    def __init__(self, model: GumihoModel, token_ids: torch.Tensor | None):
        head = model.markov_head
        self._above = head.markov_w1.weight.detach()
        self._below = head.markov_w2.weight.detach()
        self._ids = None if token_ids is None else token_ids.to(self._above.device)
        self._rows = self._ids
        if self._ids is not None and (scored := model.own_tokens()) is not None:
            # Row i of `w2` is of the i-th token that the drafter's own head scores.
            row_of = torch.zeros(len(self._above), dtype=torch.long, device=scored.device)
            row_of[scored] = torch.arange(len(scored), device=scored.device)
            self._rows = row_of[self._ids]

    def of_roots(self, roots: torch.Tensor) -> torch.Tensor:
        """Returns what token ids `(B, n)` add to the logits of the tokens below them, `(B, n, K)`."""
        logits = linear(embedding(roots.to(self._above.device), self._above), self._below)
        return logits if self._rows is None else logits.index_select(-1, self._rows)

    def apply(
        self, roots: torch.Tensor, tokens: torch.Tensor, log_probs: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """
        Returns the log-probabilities `(B, D, 1, M, M)` of candidates under each one of the depth above, as
        [`DraftTransitions.apply`] does. Those of depth 1, which have the term of the root, are the same in every case.
        """
        first = log_probs[:, :1, :, None].expand(-1, -1, -1, tokens.shape[3], -1)
        candidates = tokens.to(self._above.device)
        ids = candidates if self._ids is None else self._ids[candidates]
        rows = candidates if self._rows is None else self._rows[candidates]
        above = embedding(ids[:, :-1], self._above).float()
        below = embedding(rows[:, 1:], self._below).float()
        offsets = (above @ below.transpose(-1, -2)).to(log_probs.device) * scales[1:]
        return torch.cat((first, condition(log_probs[:, 1:], offsets)), dim=1)


class BlockCandidateGenerator(GumihoCandidateGenerator):
    """
    Makes the draft trees of a block drafter: the recombination of tokens that one pass predicts, with no serial tokens
    above them. Its cache holds keys and values of the target's states alone. The entries of a block come after them,
    and are overwritten by the next ones.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        model, config = self.assistant_model, self.assistant_model.config
        self._body: Any = model.serial_head
        # For each layer its window, and whether it is causal within a block.
        windows, are_causal = config.attention_windows or (), config.attention_causal or ()
        self._kinds = list(zip(windows, are_causal, strict=True))
        # The first query may predict nothing.
        num_queries = self.settings.tree_depth + (not config.sample_from_anchor)
        self._in_block = torch.arange(num_queries, device=self.device)
        if config.markov_rank:
            self._transitions = MarkovTransitions(model, self.token_ids)

    @staticmethod
    def _num_uncommitted(assistant_model: GumihoModel, settings: DraftingSettings) -> int:
        return settings.longest_path + 1 + settings.tree_depth + 1

    def _read_chunk(
        self, tokens: torch.Tensor, target_states: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        # The session has read them by `read_target`.
        with self.around_pass():
            self._body.write_context(self.assistant_model, target_states, position_ids, self.cache)
        return target_states

    def _run_committed(
        self, tokens: torch.Tensor, target_states: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        with self.around_pass():
            context = self.assistant_model.read_target(target_states)
            self._body.write_context(self.assistant_model, context, position_ids, self.cache)
        return context

    def _draft_levels(self, newest: NewestTokens, noise: torch.Tensor | None) -> list[DraftLevel]:
        # 1. One pass predicts the tokens of all depths.
        states = self._run_mask_tokens(newest.tokens, newest.position_ids + 1)
        of_depths = states[:, -self.settings.tree_depth :, None]
        logits = self.score(of_depths).float()  # (B, D, 1, K)
        roots = newest.tokens.to(logits.device)
        # 2. With a Markov head, that of depth 1 depends on the root.
        if self._transitions is not None:
            logits[:, 0] += self._transitions.of_roots(roots).to(logits.device)
        # 3. The best combinations of these tokens, all of them paths under the root.
        nothing = torch.zeros_like(roots)
        return self._recombine(DraftLevel(nothing, nothing.float(), nothing), logits, noise)

    def _run_mask_tokens(self, root_tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Runs a block of the newest tokens `(B, 1)` and mask tokens. Returns the states `(B, Q, H)` to be scored."""
        model, offsets = self.assistant_model, self._in_block
        batch_size, num_queries = len(root_tokens), len(offsets)
        with self.around_pass():
            block = self._body.embed_block(model, root_tokens, num_queries)
        dtype = torch.bool if self._takes_boolean_masks else block.dtype
        # Layers of one kind share a mask.
        masks = {}
        for window, is_causal in dict.fromkeys(self._kinds):
            # A query sees the block before it, and that after it as far, unless its layer is causal.
            reach = 0 if is_causal else (window or num_queries) - 1
            visible = (offsets <= offsets[:, None] + reach).expand(batch_size, -1, -1)
            depths = offsets.expand(batch_size, -1)
            masks[window, is_causal] = self.cache.attention_mask(visible, depths, dtype, window)
        of_layers = [masks[kind] for kind in self._kinds]
        features = self._run_serial_head(block, of_layers, position_ids + offsets)
        self.cache.num_pending = 0
        return model.predict(features)
