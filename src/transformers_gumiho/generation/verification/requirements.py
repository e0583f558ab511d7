"""Checks of a call before any model runs. Each error names the cause and a fix."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerationMode
from transformers.utils import logging

from ...internals import attention_implementation, compiled_module, is_pipeline_stage
from ...model.modeling_gumiho import GumihoModel
from ...model.target_shape import TargetLayers, state_width
from .attention_kind import MASKED_IMPLEMENTATIONS
from .ownership import own_step_of_decoding
from .prompt import arguments_per_token, prompt_positions
from .rollback import BLOCK_INDEX_KIND, CONVERTIBLE_LAYERS, STATE_LAYERS, can_roll_back
from .target_memory import memory_of
from .target_states import find_layers, num_scored
from .traits import TargetTraits, Unsupported, drafter_device
from .trial import check_multi_token_decode


logger = logging.get_logger(__name__)

# Settings that replace the loop or the rule by which drafts are accepted.
_CONFLICTING_SETTINGS = (
    "dola_layers", "assistant_early_exit", "use_mtp", "speculation_type", "assistant_ensemble_weight",
)  # fmt: skip
# Prompt lookup counts as assisted generation.
_DRAFTED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
# Output heads that differ by less than this share of their size are taken for the same.
_HEAD_TOLERANCE = 0.1
_WITHOUT_DRAFTER = "generate without `assistant_model`."
_LOAD_WITH_SDPA = "Load it with `attn_implementation='sdpa'`, or call `set_attn_implementation('sdpa')`."


def check_request(
    target: PreTrainedModel, drafter: GumihoModel, generation_config: GenerationConfig, mode_kwargs: dict[str, Any]
) -> TargetTraits:
    """
    Returns the traits of the target. Raises [`Unsupported`] where the target, the drafter or the way of generating
    does not allow drafting. `mode_kwargs` are arguments of `generate()` that choose how it decodes, as `tokenizer`.
    """
    for name in _CONFLICTING_SETTINGS:
        if (value := getattr(generation_config, name, None)) not in (None, False):
            raise Unsupported(f"`{name}={value!r}` is another way of decoding. Leave it unset, or {_WITHOUT_DRAFTER}")
    if (mode := generation_config.get_generation_mode()) not in _DRAFTED_MODES:
        raise Unsupported(
            f"A Gumiho assistant decodes greedily or samples, but these settings ask for `{mode.value}`. "
            f"Set `num_beams=1`, and leave `penalty_alpha` and constraints unset."
        )
    if generation_config.use_cache is False:
        raise Unsupported("A draft tree is verified against the key-value cache. Set `use_cache=True`.")
    if generation_config.output_attentions:
        raise Unsupported(
            f"`output_attentions=True` is not available with a Gumiho assistant. To get attentions, {_WITHOUT_DRAFTER}"
        )
    implementation = generation_config.cache_implementation
    if implementation not in (None, "dynamic", "dynamic_full", "static"):
        raise Unsupported(
            f"`cache_implementation={implementation!r}` is not available with a Gumiho assistant. "
            f"Leave it unset, or set it to 'static' for fixed shapes."
        )
    if mode_kwargs.get("synced_gpus"):
        raise Unsupported(
            "`synced_gpus` (ZeRO-3 or FSDP) is not available with a Gumiho assistant. "
            f"Gather the parameters first, or {_WITHOUT_DRAFTER}"
        )
    if is_pipeline_stage(target):
        raise Unsupported(
            f"{type(target).__name__} is split into pipeline stages, so no process has all states of it. "
            f"Load it with `tp_plan` or `device_map` instead, or {_WITHOUT_DRAFTER}"
        )
    _check_tokenizers(mode_kwargs.get("tokenizer"), mode_kwargs.get("assistant_tokenizer"))
    traits = check_target(target)
    if implementation == "static" and traits.is_chain:
        raise Unsupported(
            f"`cache_implementation='static'` is not available here: {traits.name} {traits.tree_obstacle}. "
            f"Leave it unset."
        )
    check_pair(target, drafter)
    if not drafter.config.has_embedding:
        try:
            drafter.share_embedding(target)
        except ValueError as error:
            raise Unsupported(f"This drafter was saved without a token embedding. {error}") from error
    return traits


def _check_tokenizers(
    tokenizer: PreTrainedTokenizerBase | None, assistant_tokenizer: PreTrainedTokenizerBase | None
) -> None:
    # A pipeline passes two tokenizers where the configs differ in the ids of special tokens alone.
    if assistant_tokenizer is not None and not _are_alike(tokenizer, assistant_tokenizer):
        raise Unsupported(
            "`assistant_tokenizer` is not known to be the target's tokenizer, whose tokens a Gumiho assistant reads. "
            "Leave it out, or pass the target's as `tokenizer` and as `assistant_tokenizer`."
        )


@functools.lru_cache(maxsize=4)  # a pipeline asks in each call, and a vocabulary is large
def _are_alike(tokenizer: PreTrainedTokenizerBase | None, other: PreTrainedTokenizerBase) -> bool:
    return tokenizer is other or (tokenizer is not None and tokenizer.get_vocab() == other.get_vocab())


def check_target(target: PreTrainedModel) -> TargetTraits:
    """Returns the traits of a target. Raises [`Unsupported`] where it can verify neither draft trees nor chains."""
    _check_class(target)
    _check_adapters(target)
    traits = TargetTraits.of(target)
    attention = traits.attention
    # Chains need no masks for trees, but a function of the user's may cut windows in another way.
    if attention.refusal and (attention.registered or not traits.is_chain):
        raise Unsupported(
            f"{traits.name} cannot verify drafts with the attention {attention.name!r}: {attention.refusal}. "
            f"{_LOAD_WITH_SDPA}"
        )
    if not traits.takes_cache:
        raise Unsupported(_why_no_cache(target, traits))
    if target.get_output_embeddings() is None:
        raise Unsupported(f"A Gumiho assistant predicts by the target's output head, and {traits.name} has none.")
    return traits


def _check_class(target: PreTrainedModel) -> None:
    """Refuses what is no decoder of transformers, or does not decode as transformers' own do."""
    name = type(target).__name__
    if not isinstance(target, PreTrainedModel):
        raise Unsupported(
            f"A Gumiho assistant drafts for a `PreTrainedModel` of transformers, and {name} is none. "
            f"Load the target with `AutoModelForCausalLM.from_pretrained`."
        )
    if not target.can_generate():
        raise Unsupported(f"{name} does not generate text. Load it with `AutoModelForCausalLM.from_pretrained`.")
    if target.config.is_encoder_decoder:
        raise Unsupported(f"A Gumiho assistant needs a decoder-only target, and {name} is an encoder-decoder.")
    if (step := own_step_of_decoding(target)) is not None:
        raise Unsupported(
            f"{name} decodes with a `{step}` of its own, which drafting would leave out. "
            f"Override `forward` or `prepare_inputs_for_generation` instead, or {_WITHOUT_DRAFTER}"
        )
    if (module := compiled_module(target)) is not None:
        raise Unsupported(
            f"{name} was compiled (its `{type(module).__name__}`), and compiled code runs no hooks that read states. "
            f"Load it anew and pass `cache_implementation='static'`, which compiles drafted calls."
        )


def _check_adapters(target: PreTrainedModel) -> None:
    """Refuses adapters that act on the place of a token, instead of the weights."""
    # For the time of a call, PEFT replaces this method of the target by that of the model around it.
    around = getattr(target.prepare_inputs_for_generation, "__self__", None)
    adapter = getattr(around, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise Unsupported(
            f"{type(adapter).__name__} puts virtual tokens before the prompt, which no drafter knows. "
            f"Call `generate()` within `disable_adapter()`, or use an adapter of weights such as LoRA."
        )
    if _has_active_alora(target):
        raise Unsupported(
            "An adapter is an activated LoRA (`alora_invocation_tokens`), which acts on a pass's newest tokens. "
            "Call `generate()` within `disable_adapter()`, or use an ordinary LoRA."
        )


def _why_no_cache(target: PreTrainedModel, traits: TargetTraits) -> str:
    # BLIP-2 and others hand their calls on.
    inner = (n for n, part in target.named_children() if isinstance(part, PreTrainedModel) and part.can_generate())
    if part := next(inner, None):
        return (
            f"{traits.name} generates with its `{part}`. Attach the drafter to that, `attach(target.{part}, ...)`, "
            f"or pass it to `generate()` as `assistant_model`."
        )
    return (
        f"{traits.name} keeps no `DynamicCache` in its argument `{traits.cache_argument}`: it has none, or a cache "
        f"or states of its own kind. Give its `forward` such a parameter, or {_WITHOUT_DRAFTER}"
    )


def _has_active_alora(target: PreTrainedModel) -> bool:
    configs = getattr(target, "peft_config", {}).values()
    if not any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        return False
    return any(not module.disable_adapters for module in target.modules() if "merged_adapters" in vars(module))


def check_pair(target: PreTrainedModel, drafter: GumihoModel) -> None:
    """Raises [`Unsupported`] where the drafter cannot draft for the target."""
    implementation = attention_implementation(drafter.config.get_text_config())
    if implementation not in MASKED_IMPLEMENTATIONS:
        raise Unsupported(
            f"The drafter's attention {implementation!r} takes no tree mask ({' and '.join(MASKED_IMPLEMENTATIONS)} "
            f"do). {_LOAD_WITH_SDPA}"
        )
    weights = list(drafter.parameters())
    is_split = any(hasattr(weight, "full_tensor") for weight in weights)  # a `DTensor`
    is_offloaded = any(weight.is_meta for weight in weights)
    if is_split or is_offloaded or len({weight.device for weight in weights}) > 1:
        raise Unsupported(
            "The drafter's weights are offloaded, on several devices, or split over processes (`fully_shard`). "
            f"Load it with `device_map='{drafter_device(target)}'`, or call `drafter.unshard()`."
        )
    config, draft = target.config.get_text_config(decoder=True), drafter.config.get_text_config()
    for what, ours, theirs in (
        # An output head that was exchanged may score more tokens than the config says.
        ("vocabulary", draft.vocab_size, max(config.vocab_size, num_scored(target.get_output_embeddings()))),
        ("hidden size", drafter.config.target_hidden_size or draft.hidden_size, state_width(config)),
    ):
        if ours not in (0, theirs):  # a vocabulary of 0 is any target's
            raise Unsupported(
                f"This Gumiho drafter has a {what} of {ours}, but {type(target).__name__} has one of {theirs}. "
                f"Use a drafter that was trained for this target."
            )
    if _has_other_head(target, drafter):
        raise Unsupported(
            f"The MTP layer of {drafter.config.converted_from!r} came with another output head than the target's. "
            f"Use a drafter that was trained for this target."
        )
    if (layers := drafter.config.layers_read(target.config)) is None:
        return
    find_layers(target, layers)
    if drafter.config.is_block:
        _check_block_pair(target, drafter, layers)
    if drafter.config.is_eagle3 and drafter.config.target_layer_ids is None:
        logger.warning_once(
            f"The EAGLE-3 head {drafter.config.converted_from or drafter.name_or_path!r} reads the layers "
            f"{list(layers.ids)} of {type(target).__name__}, as its config names none. If it was trained with others, "
            f"pass `target_layer_ids=[...]` to `from_pretrained` (in commands: --target_layer_ids)."
        )


def _has_other_head(target: PreTrainedModel, drafter: GumihoModel) -> bool:
    """Whether a drafter came with an output head that is not the target's, as far as that can be read."""
    head, rows = target.get_output_embeddings(), drafter.head_rows
    if rows is None or drafter in (equal := memory_of(head).equal_heads):
        return False
    weight = getattr(head, "weight", None)
    if type(weight) is not torch.nn.Parameter or weight.is_meta or not weight.is_floating_point():
        return False
    # A copy in another precision is near, and that of a target that was trained further, too.
    own = weight[: len(rows)].detach().float()
    if (own - rows.to(own)).norm() > _HEAD_TOLERANCE * own.norm():
        return True
    equal.add(drafter)
    return False


def _check_block_pair(target: PreTrainedModel, drafter: GumihoModel, layers: TargetLayers) -> None:
    """Refuses what the tools that train block drafters read in different ways."""
    name, config = type(target).__name__, target.config.get_text_config(decoder=True)
    if not layers.is_last_normed:
        raise Unsupported(
            f"This block drafter reads the last layer of {name} ({config.num_hidden_layers - 1}). Some tools train on "
            f"the state before the final norm, others on that after it. Use a drafter that reads lower layers."
        )
    factors = [getattr(target.get_input_embeddings(), "embed_scale", None)]
    factors += [getattr(config, field, None) for field in ("embedding_multiplier", "scale_emb")]
    is_scaled = any(factor not in (None, 1) for factor in factors)
    if is_scaled and not drafter.config.has_embedding:
        raise Unsupported(
            f"{name} scales its token embedding, and not all tools train block drafters on scaled rows. "
            f"Use a drafter with an embedding of its own."
        )


def check_inputs(
    target: PreTrainedModel,
    traits: TargetTraits,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    max_new_tokens: int,
) -> None:
    """
    Raises [`Unsupported`] where drafts cannot be verified for the inputs of a call, as `generate()` has prepared them,
    and at most `max_new_tokens` after the prompt `input_ids` `(B, T)`. The target runs for a chain's trial alone.
    """
    mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get(traits.cache_argument)
    if mask is not None and mask.ndim == 2 and not bool(mask.all()):
        _check_padding(traits, model_kwargs)
    arguments_per_token(target, traits, input_ids, model_kwargs)  # refuses those that are not known
    if generation_config.cache_implementation == "static":
        cache = None  # it is replaced by one of ours
    if cache is not None:
        _check_cache(traits, cache)
    position = int(prompt_positions(input_ids, model_kwargs).max()) + 1
    for what, limit, first, start in _limits(traits.config, position, input_ids.shape[1], cache):
        stop = start + max_new_tokens
        # Plain decoding does not run the last token.
        if first <= limit < stop - 1:
            raise Unsupported(
                f"{traits.name} {what}, and this generation may go from {start} to {stop}. "
                f"Lower `max_new_tokens`, pass no cache of an earlier turn, or {_WITHOUT_DRAFTER}"
            )
    if traits.is_chain:
        check_multi_token_decode(target, traits, mask, len(input_ids))


def _check_padding(traits: TargetTraits, model_kwargs: dict[str, Any]) -> None:
    """Refuses a padded batch of a target that reads padding differently in a pass over several tokens."""
    # MiniMax M3 chooses blocks of slots by the positions of tokens, which are not the slots of a padded row: it may
    # choose padding alone.
    reason = "because it chooses blocks as if no row had padding" if BLOCK_INDEX_KIND in traits.windows else None
    # GIT widens a padding mask by the tokens of an image, also in a text that has none.
    if traits.config.model_type == "git" and model_kwargs.get("pixel_values") is None:
        reason = "of texts without images"
    if reason is not None:
        raise Unsupported(
            f"{traits.name} cannot verify drafts in a padded batch {reason}. Generate row by row, or "
            f"{_WITHOUT_DRAFTER}"
        )


def _limits(config: PreTrainedConfig, position: int, length: int, cache: Any) -> Iterator[tuple[str, int, int, int]]:
    """
    Yields what changes in a target, as a clause that follows its name, beyond which number of tokens, how many tokens
    a text has that may not go beyond it, and how many this one has: up to the `position` of the next token, or all in
    its `length`, with padding.
    """
    # Doge keeps the tokens of the best scores. Equal tokens score alike in its first layer: which it keeps is chance.
    if (kept := getattr(config, "keep_window_size", None)) is not None:
        what = f"attends to {kept} tokens at most (`keep_window_size`), chooses among equal ones by chance"
        yield what, kept, 0, position
    if config.model_type == "phi4_multimodal":
        limit = config.original_max_position_embeddings
        num_cached = 0 if cache is None else cache.get_seq_length()
        yield f"drops its cache where a text grows beyond {limit} tokens", limit, num_cached or length, length
    # Some rotary embeddings change with the largest position.
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    # Models with two kinds of attention nest one set of parameters per kind.
    nested = [value for value in parameters.values() if isinstance(value, dict) and "rope_type" in value]
    for rope in nested or [parameters]:
        rope_type = rope.get("rope_type")
        if rope_type == "dynamic":
            limit = config.max_position_embeddings
            yield f"has a 'dynamic' rotary embedding, which changes at {limit} tokens", limit, 0, position
        elif rope_type == "longrope":
            limit = rope.get("original_max_position_embeddings", config.max_position_embeddings)
            yield f"has a 'longrope' rotary embedding, which changes at {limit} tokens", limit, position, position


def _check_cache(traits: TargetTraits, cache: Any) -> None:
    """Refuses a cache of the caller's that drafts cannot be verified against."""
    layers = getattr(cache, "layers", [])
    holds_drafts = can_roll_back if traits.is_chain else _is_convertible
    is_usable = isinstance(cache, DynamicCache) and not cache.offloading and all(map(holds_drafts, layers))
    # What a subclass or a patch does to new entries is unknown.
    update = getattr(cache, "update", None)
    is_own = getattr(update, "__func__", update) is not DynamicCache.update
    is_own = is_own or any("update" in vars(layer) for layer in layers)
    # States are kept at one size, so `crop` would find no more of their past.
    records = any(isinstance(layer, STATE_LAYERS) and getattr(layer, "record_past", False) for layer in layers)
    if is_own or records or not is_usable:
        kinds = sorted({type(layer).__name__ for layer in layers})
        raise Unsupported(
            f"A Gumiho assistant needs an ordinary `DynamicCache` on the target's device, from whose layers drafts "
            f"can be removed, without an `update` of its own or states that record their past "
            f"(`activate_past_recording`). It got {type(cache).__name__} with layers {kinds}. Pass "
            f"`{traits.cache_argument}=DynamicCache(config=target.config)`, or none; for fixed shapes set "
            f"`cache_implementation='static'`."
        )
    if not traits.is_chain:
        traits.check_is_whole(cache)


def _is_convertible(layer: Any) -> bool:
    # A cache of trees takes over what such layers hold.
    return type(layer) in CONVERTIBLE_LAYERS + STATE_LAYERS
