"""The drafter as a model of vLLM: an EAGLE head of Llama layers as the serial head, and the parallel heads."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix, process_eagle_weight

from ..model.draft_vocabulary import entry_token_ids, is_vocabulary_entry, is_vocabulary_mask
from .chain import Chain
from .checkpoint import HeadTensor, expected_names, plain_name
from .heads import BatchedHeads, DraftingHead


class GumihoForCausalLM(EagleLlamaForCausalLM):
    """
    A Gumiho drafter in vLLM. Its `forward` is that of the serial head, with vLLM's paged cache; the embedding and the
    output head are the target's.

    Raises:
        ValueError: It is loaded as a target, or to draft more tokens than it was trained for.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if vllm_config.speculative_config is None:
            raise ValueError(
                "This is a Gumiho drafter, which cannot write texts by itself. Serve the target, and pass the drafter "
                'as `--speculative-config \'{"method": "eagle", "model": ..., "num_speculative_tokens": ...}\'`.'
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = self.config
        self.chain = Chain.of_drafter(config, vllm_config.speculative_config.num_speculative_tokens)
        if config.gumiho_fc_bias:
            self.model.fc = ReplicatedLinear(
                2 * config.hidden_size,
                config.hidden_size,
                bias=True,
                params_dtype=vllm_config.model_config.dtype,
                quant_config=self.model.quant_config,
                prefix=maybe_prefix(prefix, "model.fc"),
                return_bias=False,
            )
        self.heads = BatchedHeads(
            self.chain.num_heads, config.hidden_size, config.num_serial_tokens, config.num_residual_blocks
        )
        self.drafting_head: DraftingHead | None = None

    def draft_in_parallel(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """
        Runs the parallel heads.

        Args:
            tokens (`(n, S)`): The serial tokens of each chain.
            features (`(n, S, H)`): For each of them the feature that it was drafted from.

        Returns:
            `(n, P, H)`: the features that the later tokens are drafted from.
        """
        embeddings = self.model.embed_input_ids(tokens.flatten()).view(features.shape)
        fused = self.model.fc(torch.cat((embeddings, features), dim=-1))
        return self.heads(fused.flatten(1))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the logits `(n, V)` of features `(n, H)`; without a draft vocabulary's other tokens."""
        logits = self.logits_processor(self.lm_head, hidden_states, getattr(self.lm_head, "bias", None))
        return logits if self.drafting_head is None else self.drafting_head.masked(logits)

    def best_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the ids `(n,)` of the most likely tokens for features `(n, H)`."""
        if self.drafting_head is not None and (tokens := self.drafting_head.best_tokens(hidden_states)) is not None:
            return tokens
        return self.compute_logits(hidden_states).argmax(dim=-1)

    def adopt_output_head(self) -> None:
        """Cuts the output head to the draft vocabulary, if there is one. To be called when the target has lent it."""
        vocabulary = self.config.draft_vocabulary
        if vocabulary is not None:
            token_ids = torch.tensor(vocabulary, device=self.model.fc.weight.device)
            self.drafting_head = DraftingHead(self.lm_head, token_ids)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """
        Loads a checkpoint, under any of the names that this package reads.

        Raises:
            ValueError: A tensor is missing, or is of the wrong shape.
        """
        seen: set[str] = set()
        AutoWeightsLoader(self).load_weights(self._for_serial_head(weights, seen))
        if missing := sorted(expected_names(self.config, self.chain) - seen):
            raise ValueError(
                f"The checkpoint of the Gumiho drafter lacks {', '.join(missing)}. Check that its config belongs "
                f"to it."
            )

    def _for_serial_head(
        self, weights: Iterable[tuple[str, torch.Tensor]], seen: set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Loads what is not of the serial head; yields the rest, under vLLM's names."""
        for given, tensor in weights:
            name = plain_name(given)
            if name is None or is_vocabulary_mask(name):
                continue
            seen.add(name)
            if place := HeadTensor.named(name):
                if place.head < self.chain.num_heads:
                    self.heads.load(place, tensor)
            elif is_vocabulary_entry(name):
                self._adopt_vocabulary(name, tensor)
            else:
                process_eagle_weight(self, name)
                yield f"model.{name}", tensor

    def _adopt_vocabulary(self, name: str, entry: torch.Tensor) -> None:
        if self.config.draft_vocabulary is None:
            where: Any = "of the Gumiho drafter"
            self.config.draft_vocabulary = entry_token_ids(name, entry.cpu(), self.config.vocab_size, where)


__all__ = ["GumihoForCausalLM"]
