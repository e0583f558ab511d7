"""
What a drafter takes over from its target: the layers whose states it reads, the widths of the token embedding and of
the states that become logits, and the sizes of its own layers; and the state of the weights that it was taken from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig

from ..commands import UserValueError
from ..internals import version_of


# The most specific field first. The embedding of RemBERT and ELECTRA is narrower than their layers, and OPT 350M
# projects its embedding and its states.
_EMBEDDING_FIELDS = ("input_embedding_size", "embedding_size", "word_embed_proj_dim", "hidden_size")
_STATE_FIELDS = ("output_embedding_size", "embedding_size", "word_embed_proj_dim", "hidden_size")
# The rotary scalings that a Llama layer can take over from the target as they are.
_TRANSFERABLE_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Of a drafter for a target without attention heads.
_HEAD_DIM = 64
# Numbers of each weight that are compared, because code that writes to `weight.data` counts no new version.
_NUM_COMPARED = 1024


@dataclass(frozen=True)
class TargetLayers:
    """
    Layers of a target, by number: i is the output of layer i.

    Attributes:
        ids: The numbers, from 0 up and in rising order.
        is_last_normed: Whether the state of the last layer is the one after the final norm, which becomes logits. An
            EAGLE-3 head reads the one before.
    """

    ids: tuple[int, ...]
    is_last_normed: bool = True

    @classmethod
    def of(cls, ids: Sequence[int] | None) -> "TargetLayers | None":
        """Returns the layers of `target_layer_ids`; `None` for a drafter that reads the last state alone."""
        return None if ids is None else cls(tuple(ids))

    def besides_last_states(self, target_config: PreTrainedConfig) -> tuple[int, ...]:
        """Returns those of the layers whose states are not what the target's output projection reads."""
        num_layers = target_config.get_text_config(decoder=True).num_hidden_layers
        return tuple(number for number in self.ids if number < num_layers - self.is_last_normed)


def embedding_width(target_config: PreTrainedConfig) -> int:
    """Returns `E` of the target's token embedding `(V, E)`. `target_config` is that of its text decoder."""
    return _first(target_config, _EMBEDDING_FIELDS)


def state_width(target_config: PreTrainedConfig) -> int:
    """Returns `H` of what the target's output projection `(V, H)` reads: the width of a drafter's features."""
    return _first(target_config, _STATE_FIELDS)


def resolve_layer_ids(target_config: PreTrainedConfig, layer_ids: Sequence[int]) -> list[int]:
    """
    Returns `target_layer_ids` as a [`GumihoConfig`] holds them: from 0 up and in rising order. Negative `layer_ids`
    count from the last one down. Raises `ValueError` for layers that the target does not have.
    """
    text_config = target_config.get_text_config(decoder=True)
    num_layers = text_config.num_hidden_layers
    width = state_width(text_config)
    if width != text_config.hidden_size:
        raise UserValueError(
            f"`target_layer_ids` cannot be read: the target's layers are {text_config.hidden_size} wide, and what its "
            f"output projection reads is {width} wide. Leave them out."
        )
    if any(not -num_layers <= number < num_layers for number in layer_ids):
        raise UserValueError(
            f"`target_layer_ids` must be layers of the target, which has {num_layers}: numbers from 0 to "
            f"{num_layers - 1}, or from -{num_layers} to -1. Got {list(layer_ids)}."
        )
    return sorted({number % num_layers for number in layer_ids})


def llama_fields_of(target: PreTrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the drafter's Llama config that follow from the target's text config."""
    for name in ("vocab_size", "hidden_size"):
        if not hasattr(target, name) and name not in overrides:
            raise UserValueError(
                f"{type(target).__name__} has no `{name}`, which a drafter's configuration is derived from. Pass "
                f"`{name}` as an override."
            )
    hidden_size = overrides.get("hidden_size") or state_width(target)
    # Targets without attention (Mamba, RWKV) have no heads to copy.
    num_heads = overrides.get("num_attention_heads")
    if num_heads is None:
        target_heads = _field(target, "num_attention_heads") or max(hidden_size // _HEAD_DIM, 1)
        num_heads = _divisor_up_to(hidden_size // 2, target_heads)
    kv_heads = _field(target, "num_key_value_heads") or num_heads
    widths = [_field(target, name) for name in ("intermediate_size", "ffn_dim", "n_inner")]
    widths = [width for width in widths if isinstance(width, int) and width > 0]
    fields = {
        "vocab_size": target.vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": widths[0] if widths else 4 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _divisor_up_to(num_heads, kv_heads),
        "rope_parameters": _rope_parameters(target),
        "tie_word_embeddings": False,
    }
    for name in ("max_position_embeddings", "rms_norm_eps"):
        if (value := _field(target, name)) is not None:
            fields[name] = value
    # Also where the target has none: both models share a tokenizer.
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields[name] = getattr(target, name, None)
    return fields


class SerialHeadConfig(LlamaConfig):
    """The layers of a serial head: a Llama's, with attention heads of any size (`head_dim`)."""

    def validate_architecture(self) -> None:
        """Checks, unless the size of the heads is given, that they divide the hidden size."""
        if self.head_dim == self.hidden_size // self.num_attention_heads:
            super().validate_architecture()


def llama_config(model_type: str = LlamaConfig.model_type, **fields: Any) -> SerialHeadConfig:
    """Returns the config of the layers of a serial head. Raises `ValueError` for fields of another type."""
    if model_type != LlamaConfig.model_type:
        raise UserValueError(f"`model` must describe a Llama (model_type 'llama'), got model_type {model_type!r}.")
    return SerialHeadConfig(**fields)


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> int:
    values = (getattr(config, name, None) for name in names)
    width: int = next(value for value in values if value)
    return width


def _field(config: PreTrainedConfig, name: str) -> Any:
    """Returns a field of a config, `None` where it has none, and the largest value where each layer has its own."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        values = (getattr(layer, name, None) for layer in config.per_layer_config)
        return max((value for value in values if value is not None), default=None)


def _divisor_up_to(number: int, limit: int) -> int:
    """Returns the largest divisor of `number` that is at most `limit`."""
    divisor = min(limit, number)
    while number % divisor:
        divisor -= 1
    return divisor


def _rope_parameters(target: PreTrainedConfig) -> dict[str, Any]:
    """Returns the target's rotary parameters where a Llama layer understands them, else only their base."""
    parameters = getattr(target, "rope_parameters", None) or {}
    # Models with two kinds of attention nest one set of parameters per kind.
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    parameters = parameters.get("full_attention") or (nested[0] if nested else parameters)
    default = {"rope_theta": 10000.0, "rope_type": "default"}
    kind = parameters.get("rope_type", "default")
    if kind in _TRANSFERABLE_ROPE_TYPES and "partial_rotary_factor" not in parameters:
        return default | parameters
    return default | {"rope_theta": parameters.get("rope_theta", default["rope_theta"])}


@dataclass(frozen=True, eq=False)
class WeightState:
    """
    What changes when weights are replaced or written in place: equal states are those of the same numbers, unless
    code wrote to `weight.data` and hit none of a sample.
    """

    versions: list[tuple[Any, ...]]
    sample: torch.Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, weights: Sequence[torch.Tensor], is_sampled: bool = True) -> "WeightState":
        """
        Returns the state of weights on any devices. A comparison waits for the device once; without a sample it does
        not wait.
        """
        versions = [(weight.data_ptr(), version_of(weight), weight.shape, weight.dtype) for weight in weights]
        if not weights or not is_sampled:
            return cls(versions, torch.empty(0, device="cpu"))
        device = weights[0].device
        samples = [_sample(weight.detach()).to(device, torch.float32) for weight in weights]
        return cls(versions, torch.cat(samples))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightState) or self.versions != other.versions:
            return False
        return torch.equal(self.sample, other.sample)


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Returns numbers of all parts of a weight."""
    step = max(weight.numel() // _NUM_COMPARED, 1)
    # One more than a multiple of a row's length, mostly: other columns in each row.
    if step > 1:
        step += 1
    return weight.reshape(-1)[::step]
