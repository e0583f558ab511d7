"""A drafter's config in the form in which vLLM passes it to its processes."""

from typing import Any

from transformers import GenerationConfig
from vllm.transformers_utils.configs.eagle import EAGLEConfig

from ..commands import UserError, UserValueError
from ..files import damaged_files_named
from ..model.configuration_gumiho import GumihoConfig
from ..model.draft_vocabulary import vocabulary_fault
from .contract import check_signatures


check_signatures(EAGLEConfig)


# Fields of a drafter's config that the Llama config of the serial head does not hold.
_FIELDS = (
    "num_serial_tokens", "num_parallel_heads", "num_residual_blocks", "gumiho_fc_bias", "transition_rank",
    "target_layer_ids",
)  # fmt: skip


class GumihoEagleConfig(EAGLEConfig):
    """
    The config of a Gumiho drafter as a config of an EAGLE drafter: the fields of a Llama, and those of the heads.

    Args:
        model: The Llama config of the serial head.
        kwargs: Fields of [`GumihoConfig`], and `draft_vocabulary`: the ids of the tokens that may be drafted, or
            `None` for all.
    """

    def __init__(self, model: Any = None, **kwargs: Any) -> None:
        # vLLM puts a prefix before this name, which gives the architecture in its registry.
        if model is not None and not isinstance(model, dict):
            model.architectures = ["GumihoModel"]
        super().__init__(model, method="eagle", **kwargs | {"model_type": "eagle"})
        if (layer_ids := kwargs.get("target_layer_ids")) is not None:
            # vLLM counts from the input of the first layer, this package from its output.
            self.eagle_aux_hidden_state_layer_ids = [layer + 1 for layer in layer_ids]


def read_drafter(model: Any, revision: str | None = None, token: Any = None) -> GumihoEagleConfig:
    """
    Reads the config of a drafter, in any layout that [`GumihoConfig`] reads. Released drafters without a config have a
    packaged one.

    Args:
        model: The drafter's name on the Hub, or its folder.
        revision: Revision on the Hub.
        token: Token for the Hub.

    Raises:
        OSError: There is no config, or a file of settings is damaged.
        ValueError: It is not a drafter's config, it is that of an EAGLE head, the widths of embedding and states
            differ, or the `draft_vocabulary` does not fit.
    """
    options = {"revision": revision, "token": token}
    config = GumihoConfig.from_pretrained(model, **{name: v for name, v in options.items() if v is not None})
    if config.is_mtp:
        raise UserValueError(
            f"{model!r} is the MTP layer of a target, which vLLM loads from the target itself: serve the target with "
            f"""`--speculative-config '{{"method": "mtp", "num_speculative_tokens": 1}}'`."""
        )
    if config.is_block:
        method = "dspark" if config.markov_rank else "dflash"
        raise UserValueError(
            f"{str(model)!r} is a block drafter. vLLM serves it itself: give it the repository that it was published "
            f'in as `model`, with `"method": "{method}"`.'
        )
    if config.converted_from is not None or config.is_eagle3:
        original = repr(config.converted_from) if config.converted_from else "the repository that it was loaded from"
        own = "with parallel heads" if config.num_parallel_heads else "that was saved for transformers"
        raise UserValueError(
            f"{str(model)!r} is an EAGLE head {own}. vLLM serves EAGLE heads itself: give it {original} as `model`, "
            f'with `"method": "{"eagle3" if config.is_eagle3 else "eagle"}"`.'
        )
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
    """Returns the draft vocabulary, the only decoding setting that is not about trees."""
    try:
        with damaged_files_named(model, options, "generation_config.json"):
            settings = GenerationConfig.from_pretrained(model, **options)
    except UserError:
        raise
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
