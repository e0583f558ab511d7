"""Configuration of a Gumiho drafter."""

import dataclasses
import os
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import LocalEntryNotFoundError, StrictDataclassError
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.utils import logging

from ..commands import UserOSError, UserValueError
from ..files import check_folder, damaged_files_named
from .block_configs import check_block
from .loading import as_drafter_fields, find_packaged_folder, released_names
from .target_shape import TargetLayers, embedding_width, llama_config, llama_fields_of, resolve_layer_ids


logger = logging.get_logger(__name__)

# Fields that every file has. The others are left out where they have their default, as in published configs.
_IN_EVERY_FILE = (
    "model", "num_serial_tokens", "num_parallel_heads", "num_residual_blocks", "transition_rank", "gumiho_fc_bias",
    "initializer_range", "has_embedding", "tie_word_embeddings",
)  # fmt: skip


@strict
class GumihoConfig(PreTrainedConfig):
    r"""
    Configuration of a [`GumihoModel`]: a serial Transformer head for the early tokens of a draft and parallel MLP
    heads for the later ones.

    Args:
        model (`LlamaConfig` or `dict`, *optional*):
            The Llama configuration of the drafter: sizes, vocabulary and rotary embedding as in the target, and the
            two layers of the serial head. For an MTP layer it is the target's text config, with this layer alone.
        num_serial_tokens (`int`, defaults to 2):
            Tokens drafted one after the other by the serial head.
        num_parallel_heads (`int`, defaults to 5):
            MLP heads, each of which drafts one more token; all of them run in one pass.
        num_residual_blocks (`int`, defaults to 5):
            Residual blocks in each parallel head, after the block that narrows its input to the hidden size.
        transition_rank (`int`, defaults to 0):
            Rank of the heads' [`GumihoTransition`]s. The published drafters have none.
        target_layer_ids (`list[int]`, *optional*):
            Layers of the target whose states the serial head reads, from 0 up and in rising order; see
            [`GumihoLayerFusion`]. Number i is what layer i returns; of the last layer, the state after the final norm,
            for an EAGLE-3 head before it. By default it reads the last state alone, and an EAGLE-3 head three layers.
            [`from_target`] also takes negative numbers, which count from the last layer down.
        gumiho_fc_bias (`bool`, defaults to `True`):
            Whether `fc`, which fuses a token embedding and a hidden state, has a bias.
        initializer_range (`float`, defaults to 0.02):
            Standard deviation of new weights; those of the parallel heads begin at zero.
        has_embedding (`bool`, defaults to `True`):
            Whether the drafter holds a copy of the target's token embedding, or reads the target's own.
        embedding_size (`int`, *optional*):
            Width of the token embedding, if it differs from the hidden size.
        serial_head (`str`, defaults to `"gumiho"`):
            `"gumiho"`, also for EAGLE-1 and EAGLE-2; `"eagle3"`; `"mtp"` for a target's multi-token prediction layer;
            or `"block"` for a block drafter (DFlash, JetSpec, DSpark), which drafts all tokens in one pass.
        draft_vocab_size (`int`, *optional*):
            EAGLE-3 and block drafters: tokens that the own output head scores, by their ids in the tensor `d2t`.
        target_hidden_size (`int`, *optional*):
            EAGLE-3 and block drafters: width of the target's states, if it differs from the hidden size.
        norm_before_residual (`bool`, defaults to `False`):
            EAGLE-3: whether the first layer adds to the normed state instead of the state itself.
        norm_before_fc (`bool`, defaults to `False`):
            EAGLE-3: whether the target's states have one norm before `fc`, side by side.
        fc_norm (`bool`, defaults to `False`):
            EAGLE-3.1: whether each of the target's states has a norm before `fc`.
        norm_output (`bool`, defaults to `False`):
            EAGLE-3.1 and MTP layers: whether the feature that is fed back is the one after the final norm.
        qk_norm (`bool`, defaults to `False`):
            EAGLE-3 and block drafters: whether queries and keys have norms, as in Qwen3.
        block_size (`int`, *optional*):
            Block drafters: most queries of a pass, the newest token and mask tokens.
        mask_token_id (`int`, *optional*):
            Block drafters: the token of all queries but the first.
        sample_from_anchor (`bool`, defaults to `False`):
            Block drafters: whether each query predicts the token after its own; else the token at its own place.
        attention_windows (`list[int | None]`, *optional*):
            Block drafters: how many positions a query of each layer sees, its own included; `None` for all.
        attention_causal (`list[bool]`, *optional*):
            Block drafters: whether a query of each layer sees no later ones of its block.
        markov_rank (`int`, defaults to 0):
            Block drafters: rank of the Markov head of DSpark; 0 for none.
        has_own_head (`bool`, defaults to `False`):
            Block drafters: whether there is an output head of its own.
        mtp_state_first (`bool`, defaults to `False`):
            MTP layers: whether `fc` takes the state before the embedding.
        mtp_reads_normed (`bool`, defaults to `True`):
            MTP layers: whether the target's last state is read after its final norm.
        mtp_final_norm (`bool`, defaults to `True`):
            MTP layers: whether there is a norm between the layer and the output head.
        converted_from (`str`, *optional*):
            Where this was read, if from a head of another method or a target with an MTP layer.
        tie_word_embeddings (`bool`, defaults to `False`):
            Required by transformers. A drafter ties no weights.

    Raises:
        ValueError: A field is out of range, or `model` does not describe a Llama.

    Example:

    ```python
    >>> from transformers import LlamaConfig
    >>> from transformers_gumiho import GumihoConfig

    >>> target_config = LlamaConfig(hidden_size=256, num_attention_heads=4, vocab_size=1000)
    >>> config = GumihoConfig.from_target(target_config, num_parallel_heads=3)
    >>> config.model.num_hidden_layers, config.model.hidden_size, config.max_draft_depth
    (2, 256, 5)

    ```
    """

    model_type = "gumiho"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]
    sub_configs: ClassVar[dict[str, type]] = {"model": LlamaConfig}

    model: PreTrainedConfig | dict[str, Any] | None = None
    num_serial_tokens: int = 2
    num_parallel_heads: int = 5
    num_residual_blocks: int = 5
    transition_rank: int = 0
    target_layer_ids: list[int] | None = None
    gumiho_fc_bias: bool = True
    initializer_range: float = 0.02
    has_embedding: bool = True
    embedding_size: int | None = None
    serial_head: str = "gumiho"
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    mtp_state_first: bool = False
    mtp_reads_normed: bool = True
    mtp_final_norm: bool = True
    block_size: int | None = None
    mask_token_id: int | None = None
    sample_from_anchor: bool = False
    attention_windows: list[int | None] | None = None
    attention_causal: list[bool] | None = None
    markov_rank: int = 0
    has_own_head: bool = False
    converted_from: str | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.model is None:
            self.model = LlamaConfig(num_hidden_layers=2)
        elif isinstance(self.model, dict):
            make = AutoConfig.for_model if self.is_mtp else llama_config
            self.model = make(**self.model)
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """
        Checks the fields against each other; part of the `@strict` validation.

        Raises:
            ValueError: A number is too small, or `model` does not describe a Llama.
        """
        if not isinstance(self.model, PreTrainedConfig if self.is_mtp else LlamaConfig):
            raise UserValueError(f"`model` must be a LlamaConfig or a dict, got {type(self.model).__name__}.")
        smallest = dict.fromkeys(("num_parallel_heads", "num_residual_blocks", "transition_rank"), 0)
        smallest["num_serial_tokens"] = 0 if self.is_block else 1
        for name, minimum in smallest.items():
            if getattr(self, name) < minimum:
                raise UserValueError(f"`{name}` must be at least {minimum}, got {getattr(self, name)}.")
        if self.model.num_hidden_layers < 1:
            raise UserValueError(f"`model.num_hidden_layers` must be at least 1, got {self.model.num_hidden_layers}.")
        if self.is_block:
            check_block(self)
        if self.embedding_size is not None and self.embedding_size < 1:
            raise UserValueError(f"`embedding_size` must be at least 1, or None, got {self.embedding_size}.")
        if self.serial_head not in ("gumiho", "eagle3", "mtp", "block"):
            raise UserValueError(
                f"`serial_head` must be 'gumiho', 'eagle3', 'mtp' or 'block', got {self.serial_head!r}."
            )
        ids = self.target_layer_ids
        if ids is not None and (not ids or ids[0] < 0 or ids != sorted(set(ids))):
            raise UserValueError(
                f"`target_layer_ids` must be None or numbers of layers in rising order, from 0 up, got {ids!r}."
            )

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        As `PreTrainedConfig.get_config_dict`, for the layouts of all tools, see `as_drafter_fields`. For the released
        drafters, whose repositories may have no `config.json`, the packaged one is used, and the log says so.

        Raises:
            OSError: There is no `config.json`, neither there nor in this package, or it is damaged.
            ValueError: The file describes another kind of model, or an EAGLE head that is not available here.
        """
        name, lack, cause = pretrained_model_name_or_path, "has no config.json", None
        if not os.path.isfile(name):
            check_folder(str(name), has_config=False)
        try:
            with damaged_files_named(name, kwargs):
                fields, unused = super().get_config_dict(name, **kwargs)
                if not isinstance(fields, dict):
                    raise TypeError(f"a {type(fields).__name__}")
        except OSError as error:
            # Offline, a file that the repository lacks and one that was not downloaded look the same.
            if not isinstance(getattr(error.__cause__, "__cause__", None), LocalEntryNotFoundError):
                raise
            fields, cause = {}, error
            lack = "has no config.json in the cache (the Hub was not reached)"
        if not fields:
            folder = find_packaged_folder(name)
            if folder is None and os.path.isfile(os.path.join(name, "generation_config.json")):
                raise UserOSError(
                    f"{str(name)!r} {lack}, but a generation_config.json: decoding settings alone, as `gumiho tune` "
                    f"writes them. Copy that file over the one in the drafter's folder, and give the drafter's folder."
                ) from cause
            if folder is None:
                no_folder = "" if cause is None else "is no folder, "
                raise UserOSError(
                    f"{str(name)!r} {no_folder}{lack}, and is not one of the released drafters: "
                    f"{', '.join(released_names())}. "
                    f"Pass `config=`: a `GumihoConfig`, or the name of the released drafter that it is a copy of."
                ) from cause
            logger.warning(f"{str(name)!r} {lack}; the packaged one of {folder.name} is used.")
            fields, unused = super().get_config_dict(folder, **kwargs | {"subfolder": ""})
        return as_drafter_fields(fields, name, kwargs), unused

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """
        Makes a config of the content of a `config.json`, as `PreTrainedConfig.from_dict` does. What is saved here
        always says whether `fc` has a bias; where a file does not, it has none, as for vLLM.

        Raises:
            ValueError: A field is wrong, also one among `kwargs`.
        """
        try:
            found = super().from_dict({"gumiho_fc_bias": False} | config_dict, **kwargs)
        except StrictDataclassError as error:
            raise UserValueError(f"The config of a drafter cannot be right: {error.__cause__}") from error
        # Those of `kwargs` were set one by one.
        (found[0] if isinstance(found, tuple) else found).validate_architecture()
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, as `PreTrainedConfig.to_dict` does; without most of those that have their default."""
        left_out = GumihoConfig.__annotations__.keys() - {*_IN_EVERY_FILE}
        defaults = {field.name: field.default for field in dataclasses.fields(GumihoConfig) if field.name in left_out}
        fields: dict[str, Any] = super().to_dict()
        for name, default in defaults.items():
            if name in fields and fields[name] == default:
                del fields[name]
        return fields

    @property
    def is_eagle3(self) -> bool:
        """Whether the serial head is one of EAGLE-3, which has an output head of its own."""
        return self.serial_head == "eagle3"

    @property
    def is_mtp(self) -> bool:
        """Whether the serial head is a target's multi-token prediction layer."""
        return self.serial_head == "mtp"

    @property
    def is_block(self) -> bool:
        """Whether the drafter drafts all tokens in one pass over a block, as DFlash and DSpark do."""
        return self.serial_head == "block"

    @property
    def drafts_serially(self) -> bool:
        """Whether each depth of a tree costs a pass."""
        return self.num_parallel_heads == 0 and not self.is_block

    @property
    def owns_head(self) -> bool:
        """Whether the drafter has an output head of its own."""
        return self.is_eagle3 or self.has_own_head

    def layers_read(self, target_config: PreTrainedConfig) -> TargetLayers | None:
        """
        Returns the layers of a target whose states the drafter reads; `None` where it reads the last state alone.

        Args:
            target_config: The target's.

        Raises:
            ValueError: The target has too few layers for the defaults of EAGLE-3.
        """
        if not self.mtp_reads_normed:
            last = target_config.get_text_config(decoder=True).num_hidden_layers - 1
            return TargetLayers((last,), is_last_normed=False)
        if self.serial_head in ("gumiho", "mtp"):
            return TargetLayers.of(self.target_layer_ids)
        ids = self.target_layer_ids
        num_layers = target_config.get_text_config(decoder=True).num_hidden_layers
        if ids is None:
            # Those of the paper.
            ids = [1, num_layers // 2 - 1, num_layers - 4]
            if not ids[0] < ids[1] < ids[2]:
                raise UserValueError(
                    f"This EAGLE-3 head names no layers of the target, and a target of {num_layers} layers is too "
                    f"small for the three that EAGLE-3 reads by default. Pass `target_layer_ids=[...]`."
                )
        return TargetLayers(tuple(ids), is_last_normed=num_layers - 1 not in ids)

    @property
    def has_transitions(self) -> bool:
        """Whether the parallel heads take the token above into account."""
        return self.transition_rank > 0 and self.num_parallel_heads > 0

    @property
    def embedding_width(self) -> int:
        """How many numbers the embedding of a token has."""
        return self.embedding_size or self.get_text_config().hidden_size

    @property
    def drafter_input_size(self) -> int:
        """Width of what the drafter reads of the target for each token."""
        num_states = len(self.target_layer_ids or (range(3) if self.is_eagle3 else range(1)))
        return num_states * (self.target_hidden_size or self.get_text_config().hidden_size)

    @property
    def fused_width(self) -> int:
        """Width of what the serial head reads for each token."""
        hidden_size = self.get_text_config().hidden_size
        return self.embedding_width + hidden_size if self.is_eagle3 else hidden_size

    @property
    def max_draft_depth(self) -> int:
        """The longest path this drafter can draft, in tokens."""
        if self.block_size is not None:
            return self.block_size if self.sample_from_anchor else self.block_size - 1
        return self.num_serial_tokens + self.num_parallel_heads

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """Returns the nested configuration, which holds the vocabulary and hidden sizes."""
        return self.model

    @classmethod
    def from_target(cls, target_config: PreTrainedConfig, **overrides: Any) -> "GumihoConfig":
        """
        Derives the configuration of a drafter for a target.

        Args:
            target_config (`PreTrainedConfig`): The configuration of any decoder (or of a model that contains one).
            **overrides: Fields of [`GumihoConfig`] or of the nested [`LlamaConfig`] to set instead of derive.

        Raises:
            TypeError: An override names no such field.
            ValueError: The target has no vocabulary or hidden size, or not the layers of `target_layer_ids`.
        """
        llama_fields = {field.name for field in dataclasses.fields(LlamaConfig)}
        own_fields = {field.name for field in dataclasses.fields(cls)} - {"model"}
        if unknown := sorted(set(overrides) - llama_fields - own_fields):
            raise TypeError(f"Neither GumihoConfig nor LlamaConfig has the fields {unknown}.")
        own_only = own_fields - llama_fields
        nested = {name: value for name, value in overrides.items() if name not in own_only}
        text_config = target_config.get_text_config(decoder=True)
        llama = LlamaConfig(**(llama_fields_of(text_config, nested) | nested))
        own = {name: value for name, value in overrides.items() if name in own_only}
        if "hidden_size" not in nested and embedding_width(text_config) != llama.hidden_size:
            own = {"embedding_size": embedding_width(text_config)} | own
        if own.get("target_layer_ids") is not None:
            own["target_layer_ids"] = resolve_layer_ids(text_config, own["target_layer_ids"])
        return cls(model=llama, **own)
