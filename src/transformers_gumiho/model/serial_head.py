"""
What differs between the serial heads of drafters: how they read the target, take a token in, run, and predict states.

A serial head has no state of its own. Its modules stay on the drafter, under the names of published checkpoints.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from ..internals import CACHE_NAME
from .configuration_gumiho import GumihoConfig
from .layer_fusion import GumihoLayerFusion, normalize_lower
from .serial_layers import Eagle3FirstLayer, make_layer


class GumihoSerialHead:
    """
    The serial head of Gumiho, EAGLE-1 and EAGLE-2: `fc` makes one state of an embedding and a state. Features predict
    the target's last states, and the target's output head scores them.

    Attributes:
        fuses_tokens: Whether `fc` runs for each drafted token; else once for each state of the target.
        ignored_keys: Patterns of tensors that a checkpoint may bring along.
    """

    fuses_tokens = True
    # Features are turned into tokens by the output head of the target.
    ignored_keys = (r"^(?:model\.){0,2}lm_head\.",)

    def add_modules(self, drafter: Any, config: GumihoConfig) -> None:
        """Gives a new drafter the modules of this head."""
        llama = config.get_text_config()
        drafter.fc = nn.Linear(
            config.embedding_width + llama.hidden_size, llama.hidden_size, bias=config.gumiho_fc_bias
        )
        drafter.layer_fusion = GumihoLayerFusion(config) if config.target_layer_ids is not None else None
        drafter.layers = nn.ModuleList(make_layer(llama, index) for index in range(llama.num_hidden_layers))
        drafter.rotary_emb = LlamaRotaryEmbedding(config=llama)
        # The first layer reads the output of `fc` unnormalized: the architecture has no weights for a norm here.
        drafter.layers[0].input_layernorm = nn.Identity()

    def read_target(self, drafter: Any, states: torch.Tensor) -> torch.Tensor:
        """Maps what the drafter reads of the target, `(B, T, k * H)`, to the states `(B, T, H)` for [`fuse`]."""
        if drafter.layer_fusion is None:
            return states
        # Outside of the layer, which an adapter or quantization may replace.
        states = normalize_lower(states, drafter.config.get_text_config().hidden_size)
        return drafter.layer_fusion(states.to(drafter.dtype))

    def fuse(self, drafter: Any, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Maps the embeddings of tokens and the states before them to the inputs of the layers."""
        return drafter.fc(torch.cat((embeddings, states), dim=-1))

    def run(
        self,
        drafter: Any,
        fused: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        cache: Cache | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """
        Maps the inputs of the layers to the features `(B, T, H)`, which are fed back. The arguments are those of
        [`GumihoModel.run_serial_head`].
        """
        mask = create_causal_mask(
            config=drafter.rotary_emb.config,  # the drafter's text config
            inputs_embeds=fused,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE_NAME: cache},
        )
        position_embeddings = drafter.rotary_emb(fused, position_ids)
        features = fused
        for layer in drafter.layers:
            features = layer(
                features,
                attention_mask=mask,
                position_ids=position_ids,
                use_cache=cache is not None,
                position_embeddings=position_embeddings,
                **{CACHE_NAME: cache},
                **kwargs,
            )
        return features

    def predict(self, drafter: Any, features: torch.Tensor) -> torch.Tensor:
        """Maps features to the states that an output head scores."""
        return features


class Eagle3SerialHead(GumihoSerialHead):
    """
    The head of EAGLE-3 (arXiv 2503.01840) and EAGLE-3.1: `fc` makes one state of those of several layers. The first
    layer attends to an embedding and a state side by side. The head has a final norm and an output head of its own.
    """

    fuses_tokens = False
    # The tokens of `d2t` once more, as a mask.
    ignored_keys = (r"^(?:model\.){0,2}t2d$",)

    def add_modules(self, drafter: Any, config: GumihoConfig) -> None:
        llama, width = config.get_text_config(), config.drafter_input_size
        state_width, eps = config.target_hidden_size or llama.hidden_size, llama.rms_norm_eps
        drafter.fc = nn.Linear(width, llama.hidden_size, bias=config.gumiho_fc_bias)
        further = (make_layer(llama, index, config.qk_norm) for index in range(1, llama.num_hidden_layers))
        drafter.layers = nn.ModuleList([Eagle3FirstLayer(config), *further])
        drafter.rotary_emb = LlamaRotaryEmbedding(config=llama)
        drafter.norm = LlamaRMSNorm(llama.hidden_size, eps=eps)
        drafter.lm_head = nn.Linear(llama.hidden_size, config.draft_vocab_size or llama.vocab_size, bias=False)
        drafter.input_norm = LlamaRMSNorm(width, eps=eps) if config.norm_before_fc else None
        norms = [LlamaRMSNorm(state_width, eps=eps) for _ in range(width // state_width)]
        drafter.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        if config.draft_vocab_size is not None:
            # Which tokens the rows of `lm_head` are of: their ids, less the numbers of the rows.
            drafter.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    def read_target(self, drafter: Any, states: torch.Tensor) -> torch.Tensor:
        states = states.to(drafter.dtype)
        if drafter.input_norm is not None:
            states = drafter.input_norm(states)
        if drafter.fc_norm is not None:
            of_layers = states.chunk(len(drafter.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(drafter.fc_norm, of_layers, strict=True)], dim=-1)
        return drafter.fc(states)

    def fuse(self, drafter: Any, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return torch.cat((embeddings, states), dim=-1)

    def run(self, drafter: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        features = super().run(drafter, *args, **kwargs)
        return drafter.norm(features) if drafter.config.norm_output else features

    def predict(self, drafter: Any, features: torch.Tensor) -> torch.Tensor:
        return features if drafter.config.norm_output else drafter.norm(features)


SERIAL_HEADS: dict[str, GumihoSerialHead] = {"gumiho": GumihoSerialHead(), "eagle3": Eagle3SerialHead()}
