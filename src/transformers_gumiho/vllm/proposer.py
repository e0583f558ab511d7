"""Drafting in vLLM's model runner V1."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from .chain import ChainParts
from .contract import check_signatures


check_signatures(EagleProposer)


class GumihoProposer(EagleProposer):
    """
    Drafts the serial tokens as an EAGLE head does, and all later tokens in one pass of the parallel heads.

    The arguments are those of `EagleProposer`.
    """

    # Of the base class: the probabilities `(n, tokens, V)` by which tokens were drawn; `None` if they were not drawn.
    _last_draft_probs: torch.Tensor | None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self._chain_of(self.num_speculative_tokens)  # refuses chains that are too long before any weights are loaded
        # `set_inputs_first_pass` does what the base class would do for "eagle3".
        self.method = "eagle"
        # Of the current chain: each serial token, and the feature from which it is drafted.
        self._tokens: list[torch.Tensor] = []
        self._features: list[torch.Tensor] = []
        self._sampling_metadata: SamplingMetadata | None = None

    def _chain_of(self, num_tokens: int) -> ChainParts:
        return ChainParts.of_drafter(self.draft_model_config.hf_config, num_tokens)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Loads the drafter, and gives it the target's embedding and output head."""
        super().load_model(target_model)
        self.model.adopt_target(target_model)

    def propose(self, num_speculative_tokens: int, **step: Any) -> torch.Tensor:
        """Returns chains `(n, num_speculative_tokens)`; the arguments are those of `EagleProposer`."""
        self._tokens, self._features = [], []
        chain = self._chain_of(num_speculative_tokens)
        tokens = super().propose(chain.num_serial_tokens, **step)
        self.num_speculative_tokens = num_speculative_tokens
        if not chain.num_heads:
            return tokens
        features = self.model.draft_in_parallel(torch.stack(self._tokens, 1), torch.stack(self._features, 1))
        return torch.cat((tokens, self._draft_later(features[:, : chain.num_heads])), dim=1)

    def _draft_later(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the tokens `(n, P)` of the parallel heads with these features `(n, P, H)`."""
        serial_probs, above = self._last_draft_probs, self._tokens[-1]
        if serial_probs is None:
            return self.model.best_chains(above, features)
        later, later_probs = [], [serial_probs]
        # With transitions, tokens depend on each other, so they are drafted one by one.
        step = 1 if self.model.transitions is not None else features.shape[1]
        for head in range(0, features.shape[1], step):
            block = features[:, head : head + step]
            moved = self.model.moved_features(head, block.flatten(0, 1), above)
            above, probs = super()._sample_draft_tokens(moved, self._sampling_metadata)
            later.append(above.view(block.shape[:2]))
            if probs is not None:
                later_probs.append(probs.view(*block.shape[:2], -1))
        self._last_draft_probs = torch.cat(later_probs, dim=1)
        return torch.cat(later, dim=1)

    def set_inputs_first_pass(self, *, target_hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        """Does the same as the base class, and first fuses the states of several layers into one."""
        if self.model.state_fusion is not None:
            target_hidden_states = self.model.combine_hidden_states(target_hidden_states)
        return super().set_inputs_first_pass(target_hidden_states=target_hidden_states, **kwargs)

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """Runs the passes of the serial tokens, the only passes in which other data-parallel ranks may wait."""
        num_tokens = self.num_speculative_tokens
        self.num_speculative_tokens = self._chain_of(num_tokens).num_serial_tokens
        try:
            super().dummy_run(*args, **kwargs)
        finally:
            self.num_speculative_tokens = num_tokens

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens, probs = super()._sample_draft_tokens(hidden_states, sampling_metadata)
        # A copy, because the next pass may overwrite these features.
        self._features.append(hidden_states.clone())
        self._tokens.append(tokens)
        self._sampling_metadata = sampling_metadata
        return tokens, probs

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.model.drafting_head is None:
            return super()._greedy_sample(hidden_states)
        return self.model.best_tokens(hidden_states)
