"""A drafter's config in the form in which vLLM carries it to its processes."""

from typing import Any

from transformers import GenerationConfig
from vllm.transformers_utils.configs.eagle import EAGLEConfig

from ..model.configuration_gumiho import GumihoConfig
from ..model.decoding_settings import vocabulary_fault


# Of a drafter's config, what the serial head's Llama config does not hold.
_FIELDS = (
    "num_serial_tokens", "num_parallel_heads", "num_residual_blocks", "gumiho_fc_bias", "transition_rank",
    "target_layer_ids",
)  # fmt: skip


class GumihoEagleConfig(EAGLEConfig):
    """
    The config of a Gumiho drafter, as one of an EAGLE drafter: the same fields of a Llama, and those of the heads.

    Args:
        model: The Llama config of the serial head.
        kwargs: Fields of [`GumihoConfig`], and as `draft_vocabulary` the ids of the tokens that may be drafted, or
            `None` for all.
    """

    def __init__(self, model: Any = None, **kwargs: Any) -> None:
        # Its prefix and this name make the architecture that vLLM's registry knows.
        if model is not None and not isinstance(model, dict):
            model.architectures = ["GumihoModel"]
        super().__init__(model, method="eagle", **kwargs | {"model_type": "eagle"})
        if (layer_ids := kwargs.get("target_layer_ids")) is not None:
            # vLLM counts what the first layer reads as well.
            self.eagle_aux_hidden_state_layer_ids = [layer + 1 for layer in layer_ids]


def read_drafter(model: Any, revision: str | None = None, token: Any = None) -> GumihoEagleConfig:
    """
    Reads the config of a drafter, in any layout that [`GumihoConfig`] reads; for the released drafters, which may have
    none, the packaged one.

    Args:
        model: Its name on the Hub or folder.
        revision: On the Hub.
        token: For the Hub.

    Raises:
        OSError: There is no config.
        ValueError: It is no drafter's, its embedding has another width than its states, or its `draft_vocabulary`
            does not fit it.
    """
    options = {"revision": revision, "token": token}
    config = GumihoConfig.from_pretrained(model, **{name: v for name, v in options.items() if v is not None})
    if config.embedding_width != config.get_text_config().hidden_size:
        raise ValueError(
            f"{str(model)!r} drafts from embeddings of width {config.embedding_width} and states of width "
            f"{config.get_text_config().hidden_size}, and vLLM's drafters have one width for both. Decode with it in "
            f"transformers: `target.generate(..., assistant_model=drafter)`."
        )
    return GumihoEagleConfig(
        model=config.get_text_config(),
        **{name: getattr(config, name) for name in _FIELDS},
        draft_vocabulary=_draft_vocabulary(model, config, options),
    )


def _draft_vocabulary(model: Any, config: GumihoConfig, options: dict[str, Any]) -> list[int] | None:
    """Returns the only one of the drafter's decoding settings that is not about trees."""
    try:
        settings = GenerationConfig.from_pretrained(model, **options)
    except OSError:  # there is no such file
        return None
    vocabulary = getattr(settings, "draft_vocabulary", None)
    vocab_size = config.get_text_config().vocab_size
    if vocabulary is not None and (fault := vocabulary_fault(vocabulary, vocab_size)):
        raise ValueError(
            f"In the generation_config.json of {str(model)!r}, `draft_vocabulary` must be a list of distinct token "
            f"ids from 0 to {vocab_size - 1}, but {fault}."
        )
    return vocabulary


__all__ = ["GumihoEagleConfig", "read_drafter"]
