"""Drafting in vLLM's model runner V2."""

from typing import Any

import torch
from vllm.config import VllmConfig

from .chain import ChainParts
from .serial_speculator import SerialSpeculator


class GumihoSpeculator(SerialSpeculator):
    """
    Drafts the serial tokens as an EAGLE head does, and all later tokens in one pass of the parallel heads.

    The steps of the serial head write the inputs of the parallel heads into buffers. So the inputs are there even if
    the steps were replayed from a captured graph. The heads run afterwards.

    The arguments are those of `EagleSpeculator`.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._num_serial_tokens = self._chain_of(self.num_speculative_steps).num_serial_tokens
        self._serial_features = torch.zeros(
            self._num_serial_tokens, self.max_num_reqs, self.hidden_size, dtype=self.dtype, device=device
        )
        # The position that is the key of the draw of each request's first token. The other keys follow it.
        self._first_positions = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)

    def _chain_of(self, num_tokens: int) -> ChainParts:
        return ChainParts.of_drafter(self.draft_model_config.hf_config, num_tokens)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Loads the drafter, and gives it the target's embedding and output head."""
        super().load_model(target_model)
        self.model.adopt_target(target_model)

    @torch.inference_mode()
    def propose(
        self, input_batch: Any, *args: Any, num_speculative_tokens: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Returns chains `(n, num_speculative_tokens)`; the arguments are those of `EagleSpeculator`."""
        chain = self._chain_of(
            self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        )
        tokens = self.draft_serially(chain.num_tokens, input_batch, *args, **kwargs)
        if chain.num_heads:
            self._draft_in_parallel(input_batch.num_reqs, chain)
        return tokens

    def _draft_in_parallel(self, num_reqs: int, chain: ChainParts) -> None:
        """Writes the tokens of the parallel heads after the serial ones of each request."""
        first = chain.num_serial_tokens
        serial_features = self._serial_features[:, :num_reqs].transpose(0, 1)
        features = self.model.draft_in_parallel(self.draft_tokens[:num_reqs, :first], serial_features)
        features = features[:, : chain.num_heads]
        if self._takes_best_tokens():
            tokens = self.model.best_chains(self.draft_tokens[:num_reqs, first - 1], features)
            self.draft_tokens[:num_reqs, first : chain.num_tokens] = tokens
            return
        for step in range(first, chain.num_tokens):
            self.draft_tokens[:num_reqs, step] = super().sample_draft(
                self.model.moved_features(
                    step - first, features[:, step - first], self.draft_tokens[:num_reqs, step - 1]
                ),
                self._first_positions[:num_reqs] + step,
                self.idx_mapping[:num_reqs],
                self.temperature,
                self.seeds,
                torch.full_like(self.current_draft_step, step),
                self.draft_logits,
            )

    def sample_draft(
        self, hidden_states: torch.Tensor, sample_src_positions: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Drafts one serial token for each request, and keeps the features from which it is drafted."""
        num_reqs, step = len(hidden_states), self.current_draft_step
        # The step is on the device, because a captured graph holds this once for all steps.
        self._serial_features[:, :num_reqs].index_copy_(0, step.view(1), hidden_states[None].to(self.dtype))
        self._first_positions[:num_reqs] = sample_src_positions - step
        if self._takes_best_tokens() and self.model.drafting_head is not None:
            return self.model.best_tokens(hidden_states)
        return super().sample_draft(hidden_states, sample_src_positions, *args, **kwargs)

    def _takes_best_tokens(self) -> bool:
        """Whether neither draws nor estimates of the acceptance need the logits of other tokens."""
        return self.draft_logits is None and self.acceptance_estimator is None
