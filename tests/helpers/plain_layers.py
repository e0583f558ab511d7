"""Layers of Llama and Qwen3 in plain PyTorch, without caches, and random weights for them."""

import math
from collections.abc import Callable

import torch
from torch.nn.functional import linear, silu


HIDDEN, FFN, HEADS, KV_HEADS = 32, 48, 4, 2
# No default of transformers.
EPS = 1e-3
Weights = dict[str, torch.Tensor]


class PlainLayers:
    """
    Layers by the names of their tensors.

    Attributes:
        weights: Tensors by plain names.
        head_dim: Width of attention heads.
        theta, rope_factor: Base of the rotary embedding, and by what positions are divided.
    """

    weights: Weights
    head_dim: int
    theta: float
    rope_factor: float = 1.0

    def rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weights[name]

    def feed_forward(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        inner = self.rms(x, f"{prefix}post_attention_layernorm.weight")
        gate, up, down = (self.weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return linear(silu(linear(inner, gate)) * linear(inner, up), down)

    def attention(self, inputs: torch.Tensor, seen: torch.Tensor, prefix: str) -> torch.Tensor:
        """Attends from the last Q of the inputs `(T, H)`, one at each position, to those that are seen, `(Q, T)`."""

        def project(name: str) -> torch.Tensor:
            weight, bias = (self.weights.get(f"{prefix}{name}_proj.{kind}") for kind in ("weight", "bias"))
            states = linear(inputs, weight, bias).view(len(inputs), -1, self.head_dim).transpose(0, 1)
            norm = f"{prefix}{name}_norm.weight"
            return self.rms(states, norm) if norm in self.weights else states

        half = self.head_dim // 2
        positions = torch.arange(len(inputs))[:, None] / self.rope_factor
        angles = positions * self.theta ** (-torch.arange(half) / half).double()

        def rotate(y: torch.Tensor) -> torch.Tensor:
            left, right = y[..., :half], y[..., half:]
            cos, sin = angles.cos(), angles.sin()
            return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

        q, k, v = rotate(project("q"))[:, -len(seen) :], rotate(project("k")), project("v")
        k, v = (states.repeat_interleave(len(q) // len(k), dim=0) for states in (k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)).masked_fill(~seen, -math.inf)
        return linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), self.weights[f"{prefix}o_proj.weight"])


def layer_weights(
    new: Callable[..., torch.Tensor],
    prefix: str,
    head_dim: int,
    input_size: int = HIDDEN,
    num_heads: int = HEADS,
    qkv_bias: bool = False,
) -> Weights:
    """Returns new matrices of a layer, whose q, k and v read `input_size` numbers."""
    weights = {}
    for name, heads in (("q", num_heads), ("k", KV_HEADS), ("v", KV_HEADS)):
        weights[f"{prefix}self_attn.{name}_proj.weight"] = new(heads * head_dim, input_size)
        if qkv_bias:
            weights[f"{prefix}self_attn.{name}_proj.bias"] = new(heads * head_dim)
    weights[f"{prefix}self_attn.o_proj.weight"] = new(HIDDEN, num_heads * head_dim)
    for name, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
        weights[f"{prefix}mlp.{name}_proj.weight"] = new(*shape)
    return weights
