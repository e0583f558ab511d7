"""What of a drafter's checkpoint goes where in vLLM's model. Needs no vLLM."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..model.checkpoint_conversion import IGNORED_KEYS
from ..model.draft_vocabulary import is_vocabulary_entry
from .chain import Chain


EMBEDDING = "embed_tokens.weight"
FUSION = "layer_fusion.weight"

_HEAD_TENSOR = re.compile(r"mlp\.(\d+)\.(\d+)\.linear\.(weight|bias)")
_TRANSITION_TENSOR = re.compile(r"transition\.(\d+)\.(down|up)")


@dataclass(frozen=True)
class HeadTensor:
    """Where a tensor of the parallel heads is: in which head and block, and which of the two."""

    head: int
    block: int
    kind: str

    @classmethod
    def named(cls, name: str) -> "HeadTensor | None":
        """Returns the place that a plain name is of, `None` where it is not of a head."""
        match = _HEAD_TENSOR.fullmatch(name)
        return match and cls(int(match[1]), int(match[2]), match[3])


@dataclass(frozen=True)
class TransitionTensor:
    """Where a tensor of the transitions is: of which head, and which of the two."""

    head: int
    kind: str

    @classmethod
    def named(cls, name: str) -> "TransitionTensor | None":
        """Returns the place that a plain name is of, `None` where it is not of a transition."""
        match = _TRANSITION_TENSOR.fullmatch(name)
        return match and cls(int(match[1]), match[2])


def plain_name(name: str) -> str | None:
    """
    Returns the drafter's own name of a tensor for any name that a released checkpoint may have it under, `None` for
    what is never read.
    """
    if any(re.search(pattern, name) for pattern in IGNORED_KEYS) or "rotary_emb." in name:
        return None
    return re.sub(r"^mlp\.mlp\.", "mlp.", re.sub(r"^(?:model\.){1,2}", "", name))


def expected_names(config: Any, chain: Chain) -> set[str]:
    """
    Returns the plain names of the tensors that a checkpoint has to hold for a chain. The embedding is not among them:
    a drafter without one reads that of the target.
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
    Returns whether a checkpoint for this config may hold the tensor `name`, whatever of it a chain needs. As in
    transformers, it may have more heads than the config, and transitions that the config leaves out.
    """
    if head := HeadTensor.named(name):
        return head.block <= config.num_residual_blocks
    if name == EMBEDDING or is_vocabulary_entry(name) or TransitionTensor.named(name):
        return True
    return name in expected_names(config, Chain(config.num_serial_tokens, 0))


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


__all__ = ["EMBEDDING", "FUSION", "HeadTensor", "TransitionTensor", "expected_names", "is_readable", "plain_name"]
