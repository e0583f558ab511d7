"""The layers of serial heads: Llama's, with Qwen3's norms or Qwen2's biases, and the first layer of EAGLE-3."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from .configuration_gumiho import GumihoConfig


def make_layer(llama: LlamaConfig, index: int, qk_norm: bool = False) -> LlamaDecoderLayer:
    """
    Returns a layer of a serial head.

    Args:
        llama: Its config. A field `qkv_bias` says whether q, k and v have biases, `attention_bias` whether o has one.
        index: Its number.
        qk_norm: Whether queries and keys have norms.
    """
    layer = LlamaDecoderLayer(llama, index)
    _complete_attention(layer, llama, index, llama.hidden_size, qk_norm)
    return layer


def _complete_attention(
    layer: LlamaDecoderLayer, llama: LlamaConfig, index: int, input_size: int, qk_norm: bool
) -> None:
    """Gives the attention of a layer its norms, and the width and biases of its q, k and v."""
    if qk_norm:
        fields = llama.to_dict()
        for name in ("model_type", "layer_types"):
            fields.pop(name, None)
        layer.self_attn = Qwen3Attention(Qwen3Config(**fields), index)
        # It looks up the attention function here, which may be set later.
        layer.self_attn.config = llama
    bias = getattr(llama, "qkv_bias", llama.attention_bias)
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = getattr(layer.self_attn, name)
        if (projection.in_features, projection.bias is not None) != (input_size, bias):
            setattr(layer.self_attn, name, nn.Linear(input_size, projection.out_features, bias=bias))


class Eagle3FirstLayer(LlamaDecoderLayer):
    """
    A Llama layer that attends to a token's embedding and the state before the token, side by side. Each has a norm of
    its own. What the layer computes is added to the state.
    """

    def __init__(self, config: GumihoConfig):
        llama = config.get_text_config()
        super().__init__(llama, 0)
        _complete_attention(self, llama, 0, config.fused_width, config.qk_norm)
        self.input_layernorm = LlamaRMSNorm(config.embedding_width, eps=llama.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(llama.hidden_size, eps=llama.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """
        Maps embeddings and states `(B, T, E + H)` to states `(B, T, H)`. The other arguments are those of a Llama
        layer.
        """
        width = self.hidden_norm.weight.shape[0]
        embeddings, states = hidden_states[..., :-width], hidden_states[..., -width:]
        normed = self.hidden_norm(states)
        inputs = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        attended, _ = self.self_attn(hidden_states=inputs, **kwargs)
        states = (normed if self.norm_before_residual else states) + attended
        return states + self.mlp(self.post_attention_layernorm(states))
