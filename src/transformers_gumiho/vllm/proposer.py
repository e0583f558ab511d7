"""Drafting in vLLM's model runner V1."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from .chain import Chain
from .log import log_drafter


class GumihoProposer(EagleProposer):
    """
    Drafts as an EAGLE head does, for the serial tokens, and all later tokens in one pass of the parallel heads.

    The arguments are those of `EagleProposer`.
    """

    # Of the base class: the probabilities `(n, tokens, V)` that the tokens were drawn by, where they were drawn.
    _last_draft_probs: torch.Tensor | None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        # Of the chain that is being drafted: each serial token, and the feature that it is drafted from.
        self._tokens: list[torch.Tensor] = []
        self._features: list[torch.Tensor] = []
        self._sampling_metadata: SamplingMetadata | None = None

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Loads the drafter, and lends it the target's embedding and output head."""
        super().load_model(target_model)
        self.model.adopt_output_head()
        log_drafter(self.model)

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns chains `(n, num_speculative_tokens)`; the arguments are those of `EagleProposer`."""
        self._tokens, self._features = [], []
        chain = Chain.of_drafter(self.draft_model_config.hf_config, num_speculative_tokens)
        tokens = super().propose(chain.num_serial_tokens, *args, **kwargs)
        self.num_speculative_tokens = num_speculative_tokens
        if not chain.num_heads:
            return tokens
        features = self.model.draft_in_parallel(torch.stack(self._tokens, 1), torch.stack(self._features, 1))
        features = features[:, : chain.num_heads]
        serial_probs = self._last_draft_probs
        later, probs = super()._sample_draft_tokens(features.flatten(0, 1), self._sampling_metadata)
        if probs is not None and serial_probs is not None:
            probs = probs.view(*features.shape[:2], -1)
            self._last_draft_probs = torch.cat((serial_probs, probs), dim=1)
        return torch.cat((tokens, later.view(features.shape[:2])), dim=1)

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """Runs the passes of the serial tokens, the only ones that other data-parallel ranks may be waiting in."""
        num_tokens = self.num_speculative_tokens
        self.num_speculative_tokens = Chain.of_drafter(self.draft_model_config.hf_config, num_tokens).num_serial_tokens
        try:
            super().dummy_run(*args, **kwargs)
        finally:
            self.num_speculative_tokens = num_tokens

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens, probs = super()._sample_draft_tokens(hidden_states, sampling_metadata)
        # A copy: the next pass may write its features where these are.
        self._features.append(hidden_states.clone())
        self._tokens.append(tokens)
        self._sampling_metadata = sampling_metadata
        return tokens, probs

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.model.drafting_head is None:
            return super()._greedy_sample(hidden_states)
        return self.model.best_tokens(hidden_states)


__all__ = ["GumihoProposer"]
