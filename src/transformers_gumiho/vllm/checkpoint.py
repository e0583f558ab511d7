"""The tensors of a drafter's checkpoint, and their places in vLLM's model. Works without vLLM."""

import re
from collections.abc import Iterator
from typing import Any

import torch

from ..model.checkpoint_files import plain_name
from ..model.draft_vocabulary import VOCABULARY_ENTRY
from ..model.serial_head import GumihoSerialHead
from .chain import ChainParts


EMBEDDING = "embed_tokens.weight"
FUSION = "layer_fusion.weight"

# Names of the tensors of parallel heads and their transitions.
_OF_A_HEAD = re.compile(r"(?:mlp|transition)\.\d+\.(?:(\d+)\.linear\.(?:weight|bias)|down|up)")


def is_of_a_head(name: str) -> bool:
    """Whether a plain name belongs to a tensor of a parallel head, or of its transition."""
    return _OF_A_HEAD.fullmatch(name) is not None


def copy_tensor(name: str, tensor: torch.Tensor, place: torch.Tensor) -> None:
    """
    Copies a tensor of a checkpoint to its place.

    Raises:
        ValueError: The shapes differ.
    """
    if tensor.shape != place.shape:
        raise ValueError(
            f"`{name}` has the shape {tuple(tensor.shape)}, expected {tuple(place.shape)}. Check that the drafter's "
            f"config belongs to its weights."
        )
    place.copy_(tensor)


def drafter_name(name: str) -> str | None:
    """Returns the plain name of a tensor, for any of its names in checkpoints; `None` for tensors that are ignored."""
    if any(re.search(pattern, name) for pattern in GumihoSerialHead.ignored_keys) or "rotary_emb." in name:
        return None
    return plain_name(name)


def expected_names(config: Any, chain: ChainParts) -> set[str]:
    """
    Returns the plain names of the tensors that a checkpoint must hold for a chain. The embedding is optional: without
    one, the drafter reads the target's.
    """
    heads = range(chain.num_heads)
    return {
        *_serial_names(config),
        *(
            f"mlp.{head}.{block}.linear.{kind}"
            for head in heads
            for block in range(config.num_residual_blocks + 1)
            for kind in ("weight", "bias")
        ),
        *(f"transition.{head}.{kind}" for head in heads if config.transition_rank for kind in ("down", "up")),
        *({FUSION} if getattr(config, "target_layer_ids", None) else ()),
    }


def is_readable(config: Any, name: str) -> bool:
    """
    Whether a checkpoint for this config may hold the tensor `name`, even if the chain does not need it. As in
    transformers, it may have more heads than the config, and transitions that the config leaves out.
    """
    if of_a_head := _OF_A_HEAD.fullmatch(name):
        return int(of_a_head[1] or 0) <= config.num_residual_blocks
    if name == EMBEDDING or VOCABULARY_ENTRY.fullmatch(name):
        return True
    return name in expected_names(config, ChainParts(config.num_serial_tokens, 0))


def _serial_names(config: Any) -> Iterator[str]:
    yield "fc.weight"
    if config.gumiho_fc_bias:
        yield "fc.bias"
    attention_kinds = ("weight", "bias") if getattr(config, "attention_bias", False) else ("weight",)
    mlp_kinds = ("weight", "bias") if getattr(config, "mlp_bias", False) else ("weight",)
    for layer in range(config.num_hidden_layers):
        for part in ("q", "k", "v", "o"):
            yield from (f"layers.{layer}.self_attn.{part}_proj.{kind}" for kind in attention_kinds)
        for part in ("gate", "up", "down"):
            yield from (f"layers.{layer}.mlp.{part}_proj.{kind}" for kind in mlp_kinds)
        yield f"layers.{layer}.post_attention_layernorm.weight"
        if layer:
            yield f"layers.{layer}.input_layernorm.weight"
