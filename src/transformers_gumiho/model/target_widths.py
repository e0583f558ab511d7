"""How wide a target's token embedding is, and how wide the states are that become its logits."""

from transformers import PreTrainedConfig


# The most specific field first. The embedding of RemBERT and ELECTRA is narrower than their layers, and OPT 350M
# projects its embedding and its states.
_EMBEDDING_FIELDS = ("input_embedding_size", "embedding_size", "word_embed_proj_dim", "hidden_size")
_STATE_FIELDS = ("output_embedding_size", "embedding_size", "word_embed_proj_dim", "hidden_size")


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
