"""
What differs between the serial heads of drafters: how they read the target, take a token in, run, and predict states.

A serial head has no state of its own. Its modules stay on the drafter, under the names of published checkpoints.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.models.auto import MODEL_MAPPING
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from ..commands import UserValueError
from ..internals import CACHE_NAME, attention_implementation, set_attention_implementation, supports_sdpa
from .block_layers import MarkovHead, context_entries
from .configuration_gumiho import GumihoConfig
from .layer_fusion import GumihoLayerFusion, normalize_lower
from .mtp_checkpoint import HEAD_ROWS
from .serial_layers import Eagle3FirstLayer, make_layer


class GumihoSerialHead:
    """
    The serial head of Gumiho, EAGLE-1 and EAGLE-2: `fc` makes one state of an embedding and a state. Features predict
    the target's last states, and the target's output head scores them.

    Attributes:
        fuses_tokens: Whether `fc` runs for each drafted token; else once for each state of the target.
        ignored_keys: Patterns of tensors that a checkpoint may bring along.
        misfit: What is wrong with a checkpoint that lacks tensors of the head, as the predicate of a sentence.
    """

    fuses_tokens = True
    # Features are turned into tokens by the output head of the target.
    ignored_keys: tuple[str, ...] = (r"^(?:model\.){0,2}lm_head\.",)
    misfit = "does not fit its GumihoConfig. Check that it is a Gumiho drafter and that its config belongs to it."

    def add_modules(self, drafter: Any, config: GumihoConfig) -> None:
        """Gives a new drafter the modules of this head."""
        llama = config.get_text_config()
        drafter.fc = nn.Linear(
            config.embedding_width + llama.hidden_size, llama.hidden_size, bias=config.gumiho_fc_bias
        )
        drafter.layer_fusion = None if config.target_layer_ids is None else GumihoLayerFusion(config)
        drafter.layers = nn.ModuleList(make_layer(llama, index) for index in range(llama.num_hidden_layers))
        drafter.rotary_emb = LlamaRotaryEmbedding(config=llama)
        drafter.norm = None
        # The first layer reads the output of `fc` unnormalized: the architecture has no weights for a norm here.
        drafter.layers[0].input_layernorm = nn.Identity()

    def layers(self, drafter: Any) -> nn.ModuleList:
        """Returns the layers of the head."""
        return drafter.layers

    def window(self, config: GumihoConfig) -> int | None:
        """Returns how many tokens a token attends to in the head, itself included; `None` for all before it."""
        return None

    def read_target(self, drafter: Any, states: torch.Tensor) -> torch.Tensor:
        """Maps what the drafter reads of the target, `(B, T, k * H)`, to the states `(B, T, H)` for [`fuse`]."""
        if drafter.layer_fusion is None:
            return states
        # Outside of the layer, which an adapter or quantization may replace.
        states = normalize_lower(states, drafter.config.get_text_config().hidden_size)
        return drafter.layer_fusion(states.to(drafter.dtype))

    def fuse(self, drafter: Any, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Maps the embeddings of tokens and the states before them to the inputs of the layers."""
        return drafter.fc(torch.cat((embeddings, states), dim=-1))

    def run(
        self,
        drafter: Any,
        fused: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        cache: Cache | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """
        Maps the inputs of the layers to the features `(B, T, H)`, which are fed back. The arguments are those of
        [`GumihoModel.run_serial_head`].
        """
        mask = create_causal_mask(
            config=drafter.rotary_emb.config,  # the drafter's text config
            inputs_embeds=fused,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE_NAME: cache},
        )
        masks = [mask] * len(drafter.layers)
        return self.fed_back(drafter, self.run_layers(drafter, fused, masks, position_ids, cache, **kwargs))

    def run_layers(
        self, drafter: Any, states: Any, masks: Any, position_ids: torch.Tensor, cache: Cache | None, **kwargs: Any
    ) -> Any:
        """Runs the layers on states `(B, T, H)`, each layer with its own of the masks. Returns states."""
        position_embeddings = drafter.rotary_emb(states, position_ids)
        for layer, mask in zip(drafter.layers, masks, strict=True):
            states = layer(
                states,
                attention_mask=mask,
                position_ids=position_ids,
                use_cache=cache is not None,
                position_embeddings=position_embeddings,
                **{CACHE_NAME: cache},
                **kwargs,
            )
        return states

    def fed_back(self, drafter: Any, features: torch.Tensor) -> torch.Tensor:
        """Maps what the layers return to the features."""
        return drafter.norm(features) if drafter.config.norm_output else features

    def predict(self, drafter: Any, features: torch.Tensor) -> torch.Tensor:
        """Maps features to the states that an output head scores."""
        is_final = drafter.norm is None or drafter.config.norm_output
        return features if is_final else drafter.norm(features)


def _add_output_head(drafter: Any, config: GumihoConfig) -> None:
    """Gives a drafter an output head of its own. Its rows are of all tokens, or of those that `d2t` says."""
    llama, num_scored = config.get_text_config(), config.draft_vocab_size
    drafter.lm_head = nn.Linear(llama.hidden_size, num_scored or llama.vocab_size, bias=False)
    if num_scored is not None:
        # The ids of the tokens, less the numbers of the rows.
        drafter.register_buffer("d2t", torch.zeros(num_scored, dtype=torch.long))


class Eagle3SerialHead(GumihoSerialHead):
    """
    The head of EAGLE-3 (arXiv 2503.01840) and EAGLE-3.1: `fc` makes one state of those of several layers. The first
    layer attends to an embedding and a state side by side. The head has a final norm and an output head of its own.
    """

    fuses_tokens = False
    # The tokens of `d2t` once more, as a mask.
    ignored_keys = (r"^(?:model\.){0,2}t2d$",)

    def add_modules(self, drafter: Any, config: GumihoConfig) -> None:
        llama, width = config.get_text_config(), config.drafter_input_size
        eps = llama.rms_norm_eps
        drafter.fc = nn.Linear(width, llama.hidden_size, bias=config.gumiho_fc_bias)
        drafter.layers = nn.ModuleList([Eagle3FirstLayer(config)])
        for index in range(1, llama.num_hidden_layers):
            drafter.layers.append(make_layer(llama, index, config.qk_norm))
        drafter.rotary_emb = LlamaRotaryEmbedding(config=llama)
        drafter.norm = LlamaRMSNorm(llama.hidden_size, eps=eps)
        _add_output_head(drafter, config)
        drafter.input_norm = LlamaRMSNorm(width, eps=eps) if config.norm_before_fc else None
        state_width = config.target_hidden_size or llama.hidden_size
        norms = [LlamaRMSNorm(state_width, eps=eps) for _ in range(width // state_width)]
        drafter.fc_norm = nn.ModuleList(norms) if config.fc_norm else None

    def read_target(self, drafter: Any, states: torch.Tensor) -> torch.Tensor:
        states = states.to(drafter.dtype)
        if drafter.input_norm is not None:
            states = drafter.input_norm(states)
        if drafter.fc_norm is not None:
            of_layers = zip(drafter.fc_norm, states.chunk(len(drafter.fc_norm), dim=-1), strict=True)
            states = torch.cat([norm(part) for norm, part in of_layers], dim=-1)
        return drafter.fc(states)

    def fuse(self, drafter: Any, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return torch.cat((embeddings, states), dim=-1)


class MtpSerialHead(GumihoSerialHead):
    """
    The multi-token prediction layer of a target (arXiv 2412.19437, section 2.2): a model of the target's own decoder
    class that has this layer alone. Its input is a product of a normed embedding and a normed state; the target's
    output head scores what it returns. Later tokens are drafted from its own features, as an EAGLE head does.
    """

    # They are read apart, where they are.
    ignored_keys = (rf"^{HEAD_ROWS}$",)
    misfit = (
        "has MTP layers that do not fit the target's own layers. Layers of a target that was quantized or trained "
        "further may be damaged or incomplete: name the original checkpoint instead."
    )

    def add_modules(self, drafter: Any, config: GumihoConfig) -> None:
        layers = config.get_text_config()
        decoder_class = MODEL_MAPPING[type(layers)]
        if attention_implementation(layers) == "sdpa" and not supports_sdpa(decoder_class):
            set_attention_implementation(layers, "eager")
        # It never reads an embedding of its own.
        without_vocabulary = copy.deepcopy(layers)
        without_vocabulary.vocab_size, without_vocabulary.pad_token_id = 1, None
        decoder = decoder_class(without_vocabulary)
        decoder.set_input_embeddings(nn.Identity())
        # Its final norm is the one of the MTP layer, and this module's to run.
        name = next(name for name in ("norm", "norm_f") if hasattr(decoder, name))
        norm = getattr(decoder, name)
        setattr(decoder, name, nn.Identity())
        drafter.decoder = decoder
        drafter.norm = norm if config.mtp_final_norm else nn.Identity()
        # Norms within attention may have another epsilon than this one.
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        width = layers.hidden_size
        drafter.enorm = type(norm)(config.embedding_width, eps=epsilon)
        drafter.hnorm = type(norm)(width, eps=epsilon)
        drafter.fc = nn.Linear(config.embedding_width + width, width, bias=config.gumiho_fc_bias)

    def layers(self, drafter: Any) -> nn.ModuleList:
        return drafter.decoder.layers

    def read_target(self, drafter: Any, states: torch.Tensor) -> torch.Tensor:
        return states

    def fuse(self, drafter: Any, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        parts = [drafter.enorm(embeddings), drafter.hnorm(states)]
        if drafter.config.mtp_state_first:
            parts.reverse()
        return drafter.fc(torch.cat(parts, dim=-1))

    def run(
        self,
        drafter: Any,
        fused: torch.Tensor,
        attention_mask: Any,
        position_ids: torch.Tensor,
        cache: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        features = drafter.decoder(
            inputs_embeds=fused,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=cache is not None,
            **{CACHE_NAME: cache},
            **kwargs,
        ).last_hidden_state
        return self.fed_back(drafter, features)

    def window(self, config: GumihoConfig) -> int | None:
        layers = config.get_text_config()
        kinds = getattr(layers, "layer_types", None) or [None]
        return layers.sliding_window if kinds[0] == "sliding_attention" else None


class BlockHead(GumihoSerialHead):
    """
    The body of DFlash (arXiv 2602.06036), JetSpec (arXiv 2606.18394) and DSpark. A block, the newest token and mask
    tokens after it, attends to itself and to the target's states, and predicts all of its tokens in one pass.

    `fc` makes one state of those of several layers. It has keys and values in every layer of the drafter, and is never
    updated. The layers are Qwen3's or Llama's.
    """

    fuses_tokens = False
    # A mask of the tokens of `d2t`, a judge of drafts, and copies of parts of the target.
    ignored_keys = (r"^(?:model\.){0,2}(t2d$|confidence_head\.|verifier_lm_head\.|verifier_norm\.|rotary_emb\.)",)

    def add_modules(self, drafter: Any, config: GumihoConfig) -> None:
        llama = config.get_text_config()
        drafter.fc = nn.Linear(config.drafter_input_size, llama.hidden_size, bias=config.gumiho_fc_bias)
        drafter.hidden_norm = LlamaRMSNorm(llama.hidden_size, eps=llama.rms_norm_eps)
        drafter.layers = nn.ModuleList()
        for index in range(llama.num_hidden_layers):
            drafter.layers.append(make_layer(llama, index, config.qk_norm))
        drafter.rotary_emb = LlamaRotaryEmbedding(config=llama)
        drafter.norm = LlamaRMSNorm(llama.hidden_size, eps=llama.rms_norm_eps)
        if config.has_own_head:
            _add_output_head(drafter, config)
        if config.markov_rank:
            num_scored = config.draft_vocab_size or llama.vocab_size
            drafter.markov_head = MarkovHead(llama.vocab_size, num_scored, config.markov_rank)

    def read_target(self, drafter: Any, states: torch.Tensor) -> torch.Tensor:
        # A prompt is read where the target is.
        return drafter.hidden_norm(drafter.fc(states.to(drafter.hidden_norm.weight)))

    def write_context(self, drafter: Any, context: torch.Tensor, position_ids: torch.Tensor, cache: Cache) -> None:
        """Adds keys and values of what [`read_target`] returned, `(B, n, H)`, to the cache of every layer."""
        cos, sin = drafter.rotary_emb(context, position_ids)
        for index, layer in enumerate(drafter.layers):
            cache.update(*context_entries(layer.self_attn, context, cos, sin), index)

    def embed_block(self, drafter: Any, tokens: torch.Tensor, num_queries: int) -> torch.Tensor:
        """Returns the inputs `(B, Q, H)` of the layers: the newest tokens `(B, 1)`, and mask tokens."""
        block = nn.functional.pad(tokens, (0, num_queries - 1), value=drafter.config.mask_token_id)
        return drafter.embed_tokens(block).to(drafter.dtype)

    def run(self, drafter: Any, *args: Any, **_: Any) -> torch.Tensor:
        """Runs the layers on a block after the context in the cache. The masks are a list, one of each layer."""
        states: torch.Tensor = self.run_layers(drafter, *args)
        return states

    def fuse(self, drafter: Any, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        raise UserValueError(
            "A block drafter (DFlash, JetSpec, DSpark) drafts in `generate()`, and has no `forward` over a text. It "
            "is trained by the tools that make such heads: SpecForge, DeepSpec or speculators."
        )


SERIAL_HEADS: dict[str, GumihoSerialHead] = {
    "gumiho": GumihoSerialHead(),
    "eagle3": Eagle3SerialHead(),
    "mtp": MtpSerialHead(),
    "block": BlockHead(),
}
