"""The Gumiho drafter: a serial Transformer head and parallel MLP heads (arXiv 2503.10135)."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer
from transformers.utils.deprecation import deprecate_kwarg

from ..commands import UserValueError
from ..files import PLACES, damaged_files_named
from ..internals import CACHE_NAME, attention_implementation, capture_outputs, set_attention_implementation
from .checkpoint_files import read_entry
from .companion_files import SavingMixin
from .configuration_gumiho import GumihoConfig
from .decoding_settings import DecodingSettingsMixin
from .layer_fusion import GumihoLayerFusion
from .loading import accept_checkpoint
from .mtp_checkpoint import HEAD_ROWS, has_mtp_layers, read_mtp_layers
from .mtp_layouts import mtp_settings
from .outputs import GumihoOutput
from .parallel_heads import GumihoHeadLinear, GumihoParallelHeads
from .serial_head import SERIAL_HEADS
from .token_embedding import BorrowedEmbedding, address_of, embedding_of, fitting_rows, share_equal
from .transition import GumihoTransition, GumihoTransitions
from .wrappers import as_target, unwrap_model


class GumihoPreTrainedModel(SavingMixin, DecodingSettingsMixin, PreTrainedModel):
    config: GumihoConfig
    config_class = GumihoConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    input_modalities = ("text",)
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["LlamaDecoderLayer", "GumihoParallelHeads"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["cache", CACHE_NAME]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs: ClassVar[dict[str, type[nn.Module]]] = {
        "hidden_states": LlamaDecoderLayer,
        "attentions": LlamaAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GumihoHeadLinear):
            nn.init.zeros_(module.weight)
        elif isinstance(module, (GumihoTransition, GumihoLayerFusion)):
            module.reset_parameters()


class GumihoModel(GumihoPreTrainedModel):
    """
    A Gumiho drafter. Pass it as `assistant_model` to the `generate()` of the target it was trained for.

    It holds a frozen copy of the target's token embedding, or reads the target's own ([`share_embedding`]). The
    target's output head turns its features into tokens. `generation_config` has its [`DraftingSettings`].

    EAGLE heads load as drafters without parallel heads. Those of EAGLE-3 have an output head of their own. Block
    drafters (DFlash, JetSpec, DSpark) draft all tokens in one pass, and have no `forward`.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from transformers_gumiho import GumihoModel

    >>> tokenizer = AutoTokenizer.from_pretrained("examples/demo_pair/target")
    >>> target = AutoModelForCausalLM.from_pretrained("examples/demo_pair/target", dtype="float32")
    >>> gumiho = GumihoModel.from_pretrained("examples/demo_pair/gumiho", dtype="float32")
    >>> inputs = tokenizer("def read(self):", return_tensors="pt")
    >>> drafted = target.generate(**inputs, assistant_model=gumiho, max_new_tokens=16)
    >>> drafted.equal(target.generate(**inputs, max_new_tokens=16))
    True

    ```
    """

    def __init__(self, config: GumihoConfig):
        super().__init__(config)
        llama = config.get_text_config()
        set_attention_implementation(llama, attention_implementation(config))
        self.embed_tokens: Any = BorrowedEmbedding()
        if config.has_embedding:
            self.embed_tokens = nn.Embedding(llama.vocab_size, config.embedding_width)
        self.serial_head = SERIAL_HEADS[config.serial_head]
        self.serial_head.add_modules(self, config)
        self._keys_to_ignore_on_load_unexpected = set(self.serial_head.ignored_keys)
        self.mlp = GumihoParallelHeads(config)
        self.transition = GumihoTransitions(config) if config.has_transitions else None
        # FSDP refuses the names of modules that a model does not have.
        own = {type(self.serial_layers[0]).__name__, *self._no_split_modules}
        if self.transition is not None:
            own.add(type(self.transition).__name__)
        self._no_split_modules = sorted(own)  # type: ignore[misc]
        self.gradient_checkpointing = False
        # Of an output head that came with an MTP layer. The target's has to be the same.
        self.register_buffer(HEAD_ROWS, None)
        self.set_generation_config(GenerationConfig.from_model_config(config))
        self.post_init()

    @classmethod
    def from_target(cls, target: PreTrainedModel, **overrides: Any) -> "GumihoModel":
        """
        Makes an untrained drafter for `target`, with the target's embedding copied in.

        Args:
            target (`PreTrainedModel`): Any decoder with input and output embeddings.
            **overrides: Passed to [`GumihoConfig.from_target`].

        Raises:
            ValueError: `target` is no model of transformers, or its embedding is offloaded.
        """
        target = as_target(target)
        return cls.from_embedding(target.config, embedding_of(target), **overrides)

    @classmethod
    def from_embedding(
        cls, target_config: PreTrainedConfig, embedding: torch.Tensor | None, **overrides: Any
    ) -> "GumihoModel":
        """
        As [`from_target`], where only the target's config and its token embedding are at hand.

        Args:
            target_config: The target's.
            embedding (`(V or more, E)`): The weight of its token embedding; the drafter gets its device and dtype.
            **overrides: Passed to [`GumihoConfig.from_target`].

        Raises:
            ValueError: The embedding is offloaded, or has another shape than the config asks for.
        """
        config = GumihoConfig.from_target(target_config, **overrides)
        rows = fitting_rows(embedding, config.get_text_config().vocab_size, config.embedding_width)
        model = cls(config).to(device=rows.device, dtype=rows.dtype)
        if config.has_embedding:
            model.adopt_embedding(rows.detach().clone())
        else:
            model.adopt_embedding(embedding)
        return model

    def share_embedding(self, target: PreTrainedModel) -> bool:
        """
        Makes the drafter read the target's token embedding, so that memory holds it once. A drafter that was saved
        without one needs this before its `forward`; `generate()` does it. Another drafter replaces its own embedding
        and output head if the target's are equal, on the same device and in the same dtype. If the target's embedding
        is split over processes (`tp_plan`), a drafter without one gets a whole copy; all processes must call this.

        Args:
            target (`PreTrainedModel`): The target that the drafter was made for.

        Returns:
            `bool`: Whether the two read the same memory now.

        Raises:
            ValueError: The drafter has no embedding, and the target's is offloaded or of another shape.
        """
        if self.config.owns_head:
            share_equal(self.lm_head.weight, getattr(target.get_output_embeddings(), "weight", None))
        embedding = embedding_of(target)
        if not self.config.has_embedding:
            self.adopt_embedding(embedding)
            return embedding is not None and address_of(self.embed_tokens.weight) == address_of(embedding)
        return share_equal(self.embed_tokens.weight, embedding)

    def adopt_embedding(self, embedding: torch.Tensor | None) -> None:
        """
        Makes `embedding` `(V or more, E)` the drafter's, without a copy where device and dtype are the drafter's.

        Raises:
            ValueError: It is offloaded, or of another shape.
        """
        llama = self.config.get_text_config()
        if llama.vocab_size == 0 and embedding is not None:  # a head's whose config does not say it
            llama.vocab_size = len(embedding)
        size = llama.vocab_size, self.config.embedding_width
        if not self.config.has_embedding:
            self.embed_tokens.lend(embedding, *size, like=self.fc.weight)
        else:
            self.embed_tokens.weight.data = fitting_rows(embedding, *size).to(self.embed_tokens.weight)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """
        Loads a drafter in the layouts of all tools, as `PreTrainedModel.from_pretrained` does, and refuses a
        checkpoint that does not fit.

        An output head is ignored, except of EAGLE-3 and block drafters: the target's is used. Of more parallel heads
        than in the config, the first are used, with a warning. A `token_map` or `d2t` becomes the setting
        `draft_vocabulary`, unless that is set; EAGLE-3 and block drafters keep their `d2t`.

        Raises:
            OSError: There is no config or no weight file, or a file is damaged.
            ValueError: The checkpoint lacks tensors, holds others, or holds some of the wrong shape; its layers or its
                vocabulary do not fit; or its config is that of another kind of model.
        """
        source, options = pretrained_model_name_or_path, kwargs
        allow_mismatch = kwargs.pop("ignore_mismatched_sizes", False)
        is_named = not isinstance(kwargs.get("config"), GumihoConfig)
        if is_named and (kwargs.get("variant") is not None or has_mtp_layers(source, kwargs)):
            # The tensors show what it is. transformers does not hand their place to the config.
            where = kwargs.pop("config", None) or source
            config, unused = GumihoConfig.from_pretrained(where, return_unused_kwargs=True, **kwargs)
            options = {"config": config}
            for name, value in kwargs.items():
                if name in unused or not hasattr(config, name):
                    options[name] = value
        loading = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        config = options.get("config")
        if isinstance(config, GumihoConfig) and config.is_mtp and config.converted_from == str(source):
            tensors = read_mtp_layers(source, options)
            head_rows = tensors.get(HEAD_ROWS)
            elsewhere = {name: value for name, value in options.items() if name not in PLACES}
            model, info = super().from_pretrained(None, *args, state_dict=tensors, **loading, **elsewhere)
            settings = GenerationConfig(**mtp_settings(config.get_text_config()))
            model.set_generation_config(options.get("generation_config") or settings)
        else:
            with damaged_files_named(source, options):
                model, info = super().from_pretrained(source, *args, **loading, **options)
            model.load_generation_config(options)
            head_rows = read_entry(source, HEAD_ROWS, options) if model.config.is_mtp else None
        if head_rows is not None:
            model.register_buffer(HEAD_ROWS, head_rows.to(model.device))
        accept_checkpoint(model, info, source, options, allow_mismatch)
        return (model, info) if output_loading_info else model

    def fuse(self, input_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Fuses each token with the state it was predicted from.

        Args:
            input_ids (`(B, T)`): Token ids.
            hidden_states (`(B, T, H)`): For each token, the target's state or the drafter's feature that predicted it.

        Returns:
            `(B, T, H)`, for EAGLE-3 `(B, T, E + H)`: the inputs of the serial head.
        """
        embeddings = self.embed_tokens(input_ids)
        return self.serial_head.fuse(self, embeddings, hidden_states.to(embeddings))

    def read_target(self, target_states: torch.Tensor) -> torch.Tensor:
        """
        Returns the state that [`fuse`] takes for each token that the target has read. (For later tokens it takes the
        drafter's own features.)

        Args:
            target_states (`(B, T, k * H)`): The target's states of the layers that the drafter reads, side by side; by
                default its last ones.
        """
        return self.serial_head.read_target(self, target_states)

    def run_serial_head(
        self,
        fused: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """
        Runs the serial Transformer head, or the layers of a block drafter.

        Args:
            fused: What [`fuse`] returned.
            attention_mask: `(B, past + T)` with 0 at padding, or `(B, 1, T, keys)` in the form that the attention
                implementation takes. For a block drafter a list of these, one of each layer.
            position_ids (`(B, T)`): Positions for the rotary embedding; counted on from the cache where not given.
            cache: The serial head's cache. Extended in place.

        Returns:
            `(B, T, H)`: the serial features.
        """
        if position_ids is None:
            past_length = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(past_length, past_length + fused.shape[1], device=fused.device)[None]
        return self.serial_head.run(self, fused, attention_mask, position_ids, cache, **kwargs)

    @property
    def serial_layers(self) -> nn.ModuleList:
        """The layers of the serial head."""
        return self.serial_head.layers(self)

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """
        Returns the states `(..., H)` that an output head scores, for features `(..., H)` of the serial head. These are
        the features, but for EAGLE-3, which has a final norm. What the parallel heads make is scored as it is.
        """
        return self.serial_head.predict(self, features)

    def own_tokens(self) -> torch.Tensor | None:
        """Returns the ids `(K,)` of the tokens that the drafter's own output head scores; `None` for all tokens."""
        if self.config.draft_vocab_size is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        unroll: Callable[..., Any] | None = None,
        serial_only: bool = False,
        **kwargs: Any,
    ) -> GumihoOutput:
        r"""
        Predicts, at every position, the target's next hidden states.

        Args:
            input_ids (`(B, T)`): Position t holds the token *after* hidden state t.
            hidden_states (`(B, T, k * H)`): The target's states, as [`read_target`] takes them.
            attention_mask, position_ids, cache (*optional*): As in [`run_serial_head`].
            use_cache (`bool`, defaults to `False`): Whether to create a cache where none is given.
            unroll (`Callable`, *optional*): What drafts the serial tokens from the drafter's own features at every
                position, as in drafting: `unroll_serial_head` of `transformers_gumiho.training.unrolling`.
            serial_only (`bool`, defaults to `False`): Leave the parallel heads out, as if there were none.

        Raises:
            ValueError: The shapes do not fit together, or `unroll` is given with a cache.
        """
        width = self.config.drafter_input_size
        if input_ids.shape != hidden_states.shape[:2] or hidden_states.shape[2] != width:
            raise UserValueError(
                f"`hidden_states` must have shape (batch, tokens, {width}) with the batch and tokens of "
                f"`input_ids` {tuple(input_ids.shape)}, got {tuple(hidden_states.shape)}."
            )
        if unroll is not None and (cache is not None or use_cache):
            raise UserValueError("`unroll` reads a text in one pass. Leave `cache` and `use_cache` out.")
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config.get_text_config())
        fused = self.fuse(input_ids, self.read_target(hidden_states))
        unrolled = path_inputs = None
        if unroll is None:
            features = self.run_serial_head(fused, attention_mask, position_ids, cache, **kwargs)
        else:
            found = unroll(self, input_ids, fused, attention_mask, position_ids, **kwargs)
            features, unrolled, path_inputs = found
        if serial_only:
            num_paths = max(input_ids.shape[1] - self.config.num_serial_tokens, 0)
            parallel_features = features.new_zeros(len(features), 0, num_paths, features.shape[-1])
        else:
            if path_inputs is None:
                path_inputs = self._path_inputs(input_ids, features)
            parallel_features = self._parallel_features(input_ids, path_inputs)
        return GumihoOutput(
            serial_features=self.predict(features),
            parallel_features=parallel_features,
            unrolled_features=None if unrolled is None else tuple(map(self.predict, unrolled)),
            cache=cache,
        )

    def _path_inputs(self, input_ids: torch.Tensor, serial_features: torch.Tensor) -> torch.Tensor:
        """Returns `(B, max(T - S, 0), S * H)`: at t, the fused inputs of tokens t+1..t+S of the text itself."""
        serial_tokens = self.config.num_serial_tokens
        num_paths = max(input_ids.shape[1] - serial_tokens, 0)
        fused = self.fuse(input_ids[:, 1:], serial_features[:, :-1])
        return torch.cat([fused[:, offset : offset + num_paths] for offset in range(serial_tokens)], dim=-1)

    def _parallel_features(self, input_ids: torch.Tensor, path_inputs: torch.Tensor) -> torch.Tensor:
        """Returns `(B, P, max(T - S, 0), H)`: what the heads make, moved by the tokens that the text has above."""
        features = self.mlp(path_inputs)
        if self.transition is None:
            return features
        above = self.embed_tokens(input_ids[:, self.config.num_serial_tokens :])
        # After the end of the text nothing counts.
        above = nn.functional.pad(above, (0, 0, 0, self.config.num_parallel_heads - 1))
        return self.transition(features, above.to(features))


def unwrap_drafter(model: Any) -> GumihoModel | None:
    """Returns the drafter that `model` is or wraps; `None` where it is none."""
    model = unwrap_model(model)
    return model if isinstance(model, GumihoModel) else None
