"""
What vLLM reads from a drafter's folder, and the chain it drafts from that: the rules of its Gumiho loader (RFC 43545,
pull request 43544) in plain PyTorch. It shares nothing with the package, and raises where the loader would fail, or
would leave a weight as it was initialized.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu
from transformers import AutoConfig


SERIAL_TOKENS = 2
RESIDUAL_BLOCKS = 5
ARCHITECTURES = ("Gumiho", "GumihoModel", "GumihoLlamaForCausalLM")


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the fields of the drafter: those of the nested Llama, under those of the top level."""
    written = json.loads((folder / "config.json").read_text())
    if written["model_type"] != "gumiho":
        raise ValueError(f"The model type is {written['model_type']!r}.")
    if written["architectures"][0] not in ARCHITECTURES:
        raise ValueError(f"The architectures are {written['architectures']}.")
    if written["model"]["model_type"] != "llama":
        raise ValueError("The nested config is no Llama's.")
    nested = AutoConfig.for_model(**written.pop("model")).to_dict()
    return nested | written


def expected_shapes(fields: dict[str, Any], num_speculative_tokens: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights, by their names in a checkpoint."""
    hidden, inner, vocab = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    width = fields["head_dim"] * fields["num_attention_heads"]
    kv_width = fields["head_dim"] * fields["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab, hidden)}

    def add(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    add("fc", hidden, 2 * hidden, fields.get("gumiho_fc_bias", False))
    for layer in range(fields["num_hidden_layers"]):
        for name in ("q", "k", "v"):
            rows = width if name == "q" else kv_width
            add(f"layers.{layer}.self_attn.{name}_proj", rows, hidden, fields["attention_bias"])
        add(f"layers.{layer}.self_attn.o_proj", hidden, width, fields["attention_bias"])
        add(f"layers.{layer}.mlp.gate_proj", inner, hidden, fields["mlp_bias"])
        add(f"layers.{layer}.mlp.up_proj", inner, hidden, fields["mlp_bias"])
        add(f"layers.{layer}.mlp.down_proj", hidden, inner, fields["mlp_bias"])
        shapes[f"layers.{layer}.post_attention_layernorm.weight"] = (hidden,)
        if layer > 0:
            shapes[f"layers.{layer}.input_layernorm.weight"] = (hidden,)
    for head in range(max(num_speculative_tokens - SERIAL_TOKENS, 0)):
        for block in range(1 + RESIDUAL_BLOCKS):
            add(f"mlp.{head}.{block}.linear", hidden, hidden if block else SERIAL_TOKENS * hidden, bias=True)
    return shapes


def read_names(
    found: dict[str, tuple[int, ...]], fields: dict[str, Any], num_speculative_tokens: int
) -> tuple[dict[str, str], set[str]]:
    """
    Returns the name in the model for each name in the checkpoint that is read, and the names that are dropped.

    Args:
        found: The shapes of the tensors in the checkpoint.
        fields: What [`read_config`] returned.
        num_speculative_tokens: As in `--speculative-config`.
    """
    expected = expected_shapes(fields, num_speculative_tokens)
    read, dropped = {}, set()
    for name, shape in found.items():
        inner = name
        for prefix in ("model.model.", "model."):
            inner = inner.removeprefix(prefix) if name.startswith(prefix) else inner
        if _is_dropped(inner, num_speculative_tokens, expected):
            dropped.add(name)
        elif inner not in expected:
            raise ValueError(f"There is no weight {inner!r}.")
        elif tuple(shape) != expected[inner]:
            raise ValueError(f"{inner!r} has the shape {tuple(shape)} instead of {expected[inner]}.")
        else:
            read[name] = inner
    # Where a drafter has no embedding of its own, vLLM lets it share the target's.
    if missing := set(expected) - set(read.values()) - {"embed_tokens.weight"}:
        raise ValueError(f"Nothing is read into {sorted(missing)}.")
    return read, dropped


def _is_dropped(name: str, num_speculative_tokens: int, expected: dict[str, tuple[int, ...]]) -> bool:
    if name.startswith("mlp."):
        return int(name.split(".")[1]) >= max(num_speculative_tokens - SERIAL_TOKENS, 0)
    return (
        name == "token_map"
        or any(part in name for part in ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"))
        # Any bias that the model has no place for.
        or (name.endswith(".bias") and name not in expected)
    )


class VllmDrafter:
    """
    The drafter as vLLM has it after loading.

    Args:
        folder: The drafter's. Only files at its top are read.
        num_speculative_tokens: As in `--speculative-config`.
        lm_head: The target's output head, from `(H,)` to `(V,)`.
    """

    def __init__(self, folder: Path, num_speculative_tokens: int, lm_head: Callable[[torch.Tensor], torch.Tensor]):
        self.fields = read_config(folder)
        self.num_speculative_tokens = num_speculative_tokens
        self.lm_head = lm_head
        tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        read, self.dropped = read_names(shapes, self.fields, num_speculative_tokens)
        self.weights = {inner: tensors[name] for name, inner in read.items()}

    def draft(self, tokens: torch.Tensor, states: torch.Tensor, zero_first: bool = False) -> list[int]:
        """
        Returns the chain after a text: arg-max twice, from the serial head, and once from each parallel head.

        Args:
            tokens (`(T,)`): The text from its second token on.
            states (`(T, H)`): The target's last hidden states, of the text up to its last but one token.
            zero_first: As vLLM does: the drafter's first input is zero.
        """
        inputs = self._fuse(tokens, states)
        if zero_first:
            inputs[0] = 0
        chain: list[int] = []
        head_inputs = []
        for _ in range(min(SERIAL_TOKENS, self.num_speculative_tokens)):
            feature = self._serial_head(inputs)[-1]
            chain.append(int(self.lm_head(feature).argmax()))
            head_inputs.append(self._fuse(torch.tensor(chain[-1:]), feature[None]))
            inputs = torch.cat((inputs, head_inputs[-1]))
        for head in range(self.num_speculative_tokens - SERIAL_TOKENS):
            feature = silu(self._linear(torch.cat(head_inputs, dim=1)[0], f"mlp.{head}.0.linear"))
            for block in range(1, 1 + RESIDUAL_BLOCKS):
                feature = feature + silu(self._linear(feature, f"mlp.{head}.{block}.linear"))
            chain.append(int(self.lm_head(feature).argmax()))
        return chain

    def _linear(self, states: torch.Tensor, name: str) -> torch.Tensor:
        return linear(states, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _fuse(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        embeddings = embedding(tokens, self.weights["embed_tokens.weight"])
        return self._linear(torch.cat((embeddings, states), dim=1), "fc")

    def _norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        variance = states.square().mean(dim=-1, keepdim=True)
        return states / (variance + self.fields["rms_norm_eps"]).sqrt() * self.weights[f"{name}.weight"]

    def _serial_head(self, inputs: torch.Tensor) -> torch.Tensor:
        states = inputs
        for layer in range(self.fields["num_hidden_layers"]):
            name = f"layers.{layer}"
            normed = self._norm(states, f"{name}.input_layernorm") if layer else states
            states = states + self._attention(normed, f"{name}.self_attn")
            normed = self._norm(states, f"{name}.post_attention_layernorm")
            gated = silu(self._linear(normed, f"{name}.mlp.gate_proj")) * self._linear(normed, f"{name}.mlp.up_proj")
            states = states + self._linear(gated, f"{name}.mlp.down_proj")
        return states

    def _attention(self, states: torch.Tensor, name: str) -> torch.Tensor:
        queries, keys, values = (
            self._linear(states, f"{name}.{kind}_proj").unflatten(1, (-1, self.fields["head_dim"])).transpose(0, 1)
            for kind in ("q", "k", "v")
        )
        attended = scaled_dot_product_attention(
            self._rotate(queries), self._rotate(keys), values, is_causal=True, enable_gqa=True
        )
        return self._linear(attended.transpose(0, 1).flatten(1), f"{name}.o_proj")

    def _rotate(self, states: torch.Tensor) -> torch.Tensor:
        """The rotary embedding of `(heads, T, head_dim)`, with positions from 0."""
        width, theta = states.shape[-1], self.fields["rope_parameters"]["rope_theta"]
        frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = torch.outer(torch.arange(states.shape[1], dtype=torch.float32), frequencies)
        cos, sin = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
        first, second = states.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
