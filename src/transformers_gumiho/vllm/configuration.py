"""A drafter's config in the form in which vLLM carries it to its processes."""

from typing import Any

from transformers import GenerationConfig
from vllm.transformers_utils.configs.eagle import EAGLEConfig

from ..model.configuration_gumiho import GumihoConfig
from ..model.draft_vocabulary import find_fault
from .chain import Chain


class GumihoEagleConfig(EAGLEConfig):
    """
    The config of a Gumiho drafter, as one of an EAGLE drafter: the same fields of a Llama, and those of the heads.

    Args:
        model: The Llama config of the serial head.
        num_serial_tokens: As in [`GumihoConfig`], like the four that follow.
        num_parallel_heads: See there.
        num_residual_blocks: See there.
        gumiho_fc_bias: See there.
        transition_rank: See there.
        target_layer_ids: See there.
        draft_vocabulary: Ids of the tokens that may be drafted; by default all.
    """

    def __init__(
        self,
        model: Any = None,
        num_serial_tokens: int = 2,
        num_parallel_heads: int = 5,
        num_residual_blocks: int = 5,
        gumiho_fc_bias: bool = True,
        transition_rank: int = 0,
        target_layer_ids: list[int] | None = None,
        draft_vocabulary: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        # Its prefix and this name make the architecture that vLLM's registry knows.
        if model is not None and not isinstance(model, dict):
            model.architectures = ["GumihoModel"]
        super().__init__(model, method="eagle", **kwargs | {"model_type": "eagle"})
        self.num_serial_tokens = num_serial_tokens
        self.num_parallel_heads = num_parallel_heads
        self.num_residual_blocks = num_residual_blocks
        self.gumiho_fc_bias = gumiho_fc_bias
        self.transition_rank = transition_rank
        self.target_layer_ids = target_layer_ids
        if target_layer_ids is not None:
            # vLLM counts what the first layer reads as well.
            self.eagle_aux_hidden_state_layer_ids = [layer + 1 for layer in target_layer_ids]
        self.draft_vocabulary = draft_vocabulary
        self._num_lookahead_tokens = 0

    @property
    def num_lookahead_tokens(self) -> int:
        """The length of the chain. vLLM sets it for configs that have it, before any process starts."""
        return self._num_lookahead_tokens

    @num_lookahead_tokens.setter
    def num_lookahead_tokens(self, num_tokens: int) -> None:
        self._num_lookahead_tokens = Chain.of_drafter(self, num_tokens).num_tokens


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
        num_serial_tokens=config.num_serial_tokens,
        num_parallel_heads=config.num_parallel_heads,
        num_residual_blocks=config.num_residual_blocks,
        gumiho_fc_bias=config.gumiho_fc_bias,
        transition_rank=config.transition_rank,
        target_layer_ids=config.target_layer_ids,
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
    if vocabulary is not None and (fault := find_fault(vocabulary, vocab_size)):
        raise ValueError(
            f"In the generation_config.json of {str(model)!r}, `draft_vocabulary` must be a list of distinct token "
            f"ids from 0 to {vocab_size - 1}, but {fault}."
        )
    return vocabulary


__all__ = ["GumihoEagleConfig", "read_drafter"]
