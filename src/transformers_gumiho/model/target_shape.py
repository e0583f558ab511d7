"""
What of a target a drafter is made for: the layers whose states it reads, how wide the token embedding is, and how wide
the states are that become logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig


# The most specific field first. The embedding of RemBERT and ELECTRA is narrower than their layers, and OPT 350M
# projects its embedding and its states.
_EMBEDDING_FIELDS = ("input_embedding_size", "embedding_size", "word_embed_proj_dim", "hidden_size")
_STATE_FIELDS = ("output_embedding_size", "embedding_size", "word_embed_proj_dim", "hidden_size")


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


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> int:
    values = (getattr(config, name, None) for name in names)
    width: int = next(value for value in values if value)
    return width
