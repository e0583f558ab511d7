"""The drafter as a model of vLLM: an EAGLE head of Llama layers as the serial head, and the parallel heads."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM, LlamaModel
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix, process_eagle_weight

from ..model.draft_vocabulary import VOCABULARY_ENTRY, VOCABULARY_MASK, entry_token_ids
from .chain import ChainParts
from .checkpoint import FUSION, copy_tensor, drafter_name, expected_names, is_of_a_head, is_readable
from .contract import check_signatures
from .heads import BatchedHeads, DraftingHead
from .layer_fusion import StateFusion
from .transitions import ChainTransitions


check_signatures(
    AutoWeightsLoader, EagleLlamaForCausalLM, LlamaModel, LogitsProcessor, ReplicatedLinear, maybe_prefix,
    process_eagle_weight,
)  # fmt: skip
# Below vLLM's own logger, so its handlers and level apply.
logger = init_logger("vllm.transformers_gumiho")


class GumihoForCausalLM(EagleLlamaForCausalLM):
    """
    A Gumiho drafter in vLLM. Its `forward` runs the serial head, with vLLM's paged cache. The embedding and the output
    head are the target's.

    Raises:
        ValueError: It is loaded as a target, for more tokens than it drafts, or with a method that does not pass on
            the states that it reads.
    """

    # The target's.
    lm_head: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if vllm_config.speculative_config is None:
            raise ValueError(
                "This is a Gumiho drafter, which cannot generate text alone. Serve the target, and pass the drafter "
                'as `--speculative-config \'{"method": "eagle", "model": ..., "num_speculative_tokens": ...}\'`.'
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = self.config
        _check_method(vllm_config.speculative_config.method, config.target_layer_ids)
        self.chain = ChainParts.of_drafter(config, vllm_config.speculative_config.num_speculative_tokens)
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
        self.transitions: ChainTransitions | None = None
        if config.transition_rank and self.chain.num_heads:
            self.transitions = ChainTransitions(self.chain.num_heads, config.hidden_size, config.transition_rank)
        self.state_fusion: StateFusion | None = None
        if layer_ids := config.target_layer_ids:
            num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
            self.state_fusion = StateFusion(len(layer_ids), config.hidden_size, layer_ids[-1] == num_layers - 1)
        self.drafting_head: DraftingHead | None = None
        self._has_target = False
        # How the target scales and caps its logits.
        self._logit_scale, self._soft_cap = 1.0, None

    def combine_hidden_states(self, states: torch.Tensor) -> torch.Tensor:
        """Maps the states of `target_layer_ids` `(n, k * H)` to the input of the serial head, `(n, H)`."""
        assert self.state_fusion is not None
        return self.state_fusion(states)

    def draft_in_parallel(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """
        Runs the parallel heads.

        Args:
            tokens (`(n, S)`): The serial tokens of each chain. features (`(n, S, H)`): The features from which these
            tokens were drafted.

        Returns:
            `(n, P, H)`: the features from which the later tokens are drafted, before their transitions.
        """
        embeddings = self.model.embed_input_ids(tokens.flatten()).view(features.shape)
        fused = self.model.fc(torch.cat((embeddings, features), dim=-1))
        return self.heads(fused.flatten(1))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Returns the logits `(n, V)` of features `(n, H)`, scaled and capped like the target's. Tokens outside of the
        draft vocabulary are minus infinity.
        """
        logits = self._all_logits(hidden_states)
        if self._soft_cap is not None:
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        return self._masked(logits * self._logit_scale)

    def _masked(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.drafting_head is None else self.drafting_head.masked(logits)

    def _all_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self._has_target:
            raise RuntimeError(
                "This Gumiho drafter did not get its target: on this platform vLLM drafts with a class of its own in "
                "place of `EagleProposer` or `EagleSpeculator`, which the plug-in does not know. Serve without "
                "`--speculative-config`."
            )
        return self.logits_processor(self.lm_head, hidden_states, getattr(self.lm_head, "bias", None))

    def best_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the ids `(n,)` of the most likely tokens for features `(n, H)`."""
        logits, token_ids = self._drafted_logits(hidden_states)
        places = logits.argmax(dim=-1)
        return places if token_ids is None else token_ids[places]

    def best_chains(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """
        Returns the most likely tokens `(n, P)` of the parallel heads.

        Args:
            tokens (`(n,)`): The last serial token of each chain. features (`(n, P, H)`): The result of
            [`draft_in_parallel`].
        """
        if self.transitions is None:
            return self.best_tokens(features.flatten(0, 1)).view(features.shape[:2])
        logits, token_ids = self._drafted_logits(features.flatten(0, 1))
        logits = logits.view(*features.shape[:2], -1)
        return self.transitions.best_candidates(logits, tokens, self.model.embed_input_ids, token_ids)

    def moved_features(self, head: int, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the features `(n, H)` of a parallel head, changed by its transition for the tokens `(n,)` above."""
        if self.transitions is None:
            return features
        return self.transitions.move(head, features, self.model.embed_input_ids(tokens))

    def _drafted_logits(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Returns logits for features `(n, H)`, and the ids of their tokens; `None` if the logits are of all tokens. They
        are not scaled or capped, which does not change their order.
        """
        if self.drafting_head is not None and (logits := self.drafting_head.logits(features)) is not None:
            return logits, self.drafting_head.token_ids
        return self._masked(self._all_logits(features)), None

    def adopt_target(self, target: Any) -> None:
        """
        Adopts parts of the target: its embedding and output head without adapters, the scale and cap of its logits,
        and its final norm if the drafter reads the last layer among others. If there is a draft vocabulary, the output
        head is cut to it.

        Raises:
            ValueError: The final norm cannot be found.
        """
        self._has_target = True
        is_whole = hasattr(target, "get_language_model")  # a multimodal model
        language_model = target.get_language_model() if is_whole else target
        if not hasattr(self, "lm_head"):  # the target's output head is its embedding, as in Gemma 2
            self.lm_head = language_model.model.embed_tokens
        # Adapters work only within the target's own passes, whose batches they know.
        if isinstance(self.model.embed_tokens, BaseLayerWithLoRA):
            self.model.embed_tokens = self.model.embed_tokens.base_layer
        if isinstance(self.lm_head, BaseLayerWithLoRA):
            self.lm_head = self.lm_head.base_layer
        if (processor := getattr(language_model, "logits_processor", None)) is not None:
            self._logit_scale, self._soft_cap = processor.scale, processor.soft_cap
        if self.state_fusion is not None:
            self.state_fusion.adopt_target(language_model)
        if self.transitions is not None:
            self.transitions.adopt_output_head(self._all_logits)
        vocabulary = self.config.draft_vocabulary
        if vocabulary is not None:
            token_ids = torch.tensor(vocabulary, device=self.model.fc.weight.device)
            self.drafting_head = DraftingHead(self.lm_head, token_ids)
            if self.transitions is not None and self.drafting_head.is_cut:
                self.transitions.keep_tokens(token_ids)
        among = "" if vocabulary is None else f", among {len(vocabulary)} that may be drafted"
        logger.info("The Gumiho plug-in drafts %s%s.", self.chain, among)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """
        Loads a checkpoint, with any of the names that this package reads.

        Raises:
            ValueError: A tensor is missing, has the wrong shape, or does not belong to this drafter.
        """
        seen: set[str] = set()
        AutoWeightsLoader(self).load_weights(self._for_serial_head(weights, seen))
        missing = expected_names(self.config, self.chain) - seen
        # vLLM's loader ignores a bias for which a layer has no place.
        unexpected = {name for name in seen if not is_readable(self.config, name)}
        for problem, names in (("lacks", missing), ("holds what its config has no place for:", unexpected)):
            if names:
                raise ValueError(
                    f"The checkpoint of the Gumiho drafter {problem} {', '.join(sorted(names))}. Check that its "
                    f"config belongs to it."
                )

    def _for_serial_head(
        self, weights: Iterable[tuple[str, torch.Tensor]], seen: set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Loads the other tensors; yields the tensors of the serial head with vLLM's names."""
        places = self.heads.places() | ({} if self.transitions is None else self.transitions.places())
        if self.state_fusion is not None:
            places[FUSION] = self.state_fusion.weight.data
        for given, tensor in weights:
            name = drafter_name(given)
            if name is None or VOCABULARY_MASK.fullmatch(name):
                continue
            seen.add(name)
            if name in places:
                copy_tensor(name, tensor, places[name])
            elif VOCABULARY_ENTRY.fullmatch(name):
                self._adopt_vocabulary(name, tensor)
            elif is_readable(self.config, name) and not is_of_a_head(name):
                process_eagle_weight(self, name)
                yield f"model.{name}", tensor

    def _adopt_vocabulary(self, name: str, entry: torch.Tensor) -> None:
        if self.config.draft_vocabulary is None:
            where: Any = "of the Gumiho drafter"
            self.config.draft_vocabulary = entry_token_ids(name, entry.cpu(), self.config.vocab_size, where)


def _check_method(method: str | None, layer_ids: list[int] | None) -> None:
    """Raises `ValueError` if vLLM passes on other states of the target than the drafter reads."""
    needed = "eagle" if layer_ids is None else "eagle3"
    if method != needed:
        reads = "the target's last states" if layer_ids is None else f"the states of the target's layers {layer_ids}"
        raise ValueError(
            f"The `method` of this Gumiho drafter has to be {needed!r}, got {method!r}: it reads {reads}. Pass "
            f'`--speculative-config \'{{"method": "{needed}", ...}}\'`.'
        )
