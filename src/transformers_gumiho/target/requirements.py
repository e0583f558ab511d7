"""What decoding with a draft tree refuses, before any model runs: each with its cause and the way out."""

import inspect
from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerationMode

from ..internals import attention_implementation, cache_argument, is_stateful, keeps_dynamic_cache
from ..model.modeling_gumiho import GumihoModel
from ..model.target_widths import state_width
from .cache_moving import is_convertible
from .chain_layers import BLOCK_INDEX_KIND, can_be_taken_back
from .feature_reader import find_layers
from .own_caches import cache_class
from .unmasked_attention import MASKED_IMPLEMENTATIONS, tree_attention_obstacle


class Unsupported(ValueError):
    """
    A call of `generate()` that cannot be drafted. It is raised before any model runs. With an attached drafter such a
    call decodes plainly instead.
    """


# Settings that replace the loop or the rule by which drafts are accepted.
_OTHER_WAYS = ("dola_layers", "assistant_early_exit", "use_mtp", "speculation_type", "assistant_ensemble_weight")
# Prompt lookup, without the assistant, is assisted generation, too.
_DRAFTED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)

# Kinds of attention whose mask a tree can be written into.
ATTENTION_TYPES = ("full_attention", "sliding_attention")


def reason_against(check: Callable[..., None], *args: Any) -> str | None:
    """Returns why one of these checks refuses a call; `None` where the call can be drafted."""
    try:
        check(*args)
    except Unsupported as reason:
        return str(reason)
    return None


def attention_types(target: PreTrainedModel) -> set[str]:
    """Returns the kinds of attention in the target's decoder layers, by the names transformers' configs use."""
    config = target.config.get_text_config(decoder=True)
    if getattr(config, "layer_types", None):
        return set(config.layer_types)
    return {"full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"}


def check_request(
    target: PreTrainedModel,
    drafter: GumihoModel,
    generation_config: GenerationConfig,
    mode_kwargs: dict[str, Any],
) -> None:
    """
    Raises [`Unsupported`] where the target or the way of generating does not allow verifying a draft tree.

    Args:
        target: The target.
        drafter: The drafter.
        generation_config: As prepared by `generate()`.
        mode_kwargs: The arguments of `generate()` that choose how it decodes, such as `tokenizer`.
    """
    for name in _OTHER_WAYS:
        if (value := getattr(generation_config, name, None)) not in (None, False):
            raise Unsupported(
                f"`{name}={value!r}` is another way of decoding, which a Gumiho assistant would ignore. Leave it "
                f"unset, or generate without `assistant_model`."
            )
    if (mode := generation_config.get_generation_mode()) not in _DRAFTED_MODES:
        raise Unsupported(
            f"A Gumiho assistant works with greedy decoding and sampling, but these settings ask for `{mode.value}`. "
            f"Set `num_beams=1` and leave `penalty_alpha` and constraints unset, or generate without "
            f"`assistant_model`."
        )
    if generation_config.use_cache is False:
        raise Unsupported("A draft tree is verified against the key-value cache. Set `use_cache=True`.")
    if generation_config.output_attentions:
        raise Unsupported(
            "`output_attentions=True` is not available with a Gumiho assistant: the target attends to a full draft "
            "tree at once. Generate without `assistant_model` to get attentions."
        )
    if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full", "static"):
        raise Unsupported(
            f"`cache_implementation={generation_config.cache_implementation!r}` is not available with a Gumiho "
            f"assistant, which keeps a cache of its own. Leave it unset, or set it to 'static' for fixed shapes and "
            f"compilation."
        )
    if mode_kwargs.get("synced_gpus"):
        raise Unsupported(
            "`synced_gpus` (ZeRO-3 or FSDP over several processes) is not available with a Gumiho assistant. Gather "
            "the parameters first, or generate without `assistant_model`."
        )
    check_tokenizers(mode_kwargs.get("tokenizer"), mode_kwargs.get("assistant_tokenizer"))
    check_target(target)
    if generation_config.cache_implementation == "static" and (obstacle := tree_obstacle(target)):
        raise Unsupported(
            f"`cache_implementation='static'` is not available here: {type(target).__name__} {obstacle}, and chains "
            f"are verified against the target's own growing cache. Leave `cache_implementation` unset."
        )
    check_pair(target, drafter)


# For each tokenizer of an assistant, those of targets that it was found to be the same as.
_same_tokenizers: WeakKeyDictionary[PreTrainedTokenizerBase, WeakSet[PreTrainedTokenizerBase]] = WeakKeyDictionary()


def check_tokenizers(
    tokenizer: PreTrainedTokenizerBase | None, assistant_tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """
    Raises [`Unsupported`] where the assistant was given a tokenizer of its own. Where only the ids of special tokens
    differ between the two configs, a pipeline passes the same tokenizer twice.
    """
    if assistant_tokenizer is None or assistant_tokenizer is tokenizer:
        return
    known = _same_tokenizers.setdefault(assistant_tokenizer, WeakSet())
    if tokenizer is not None and tokenizer not in known and tokenizer.get_vocab() == assistant_tokenizer.get_vocab():
        known.add(tokenizer)
    if tokenizer not in known:
        raise Unsupported(
            "A Gumiho assistant reads the target's tokens, and `assistant_tokenizer` is not known to be the target's "
            "tokenizer. Leave it out, or pass the target's as `tokenizer` and as `assistant_tokenizer`."
        )


def verification_kind(target: PreTrainedModel) -> Literal["tree", "chain"]:
    """Returns whether the target verifies draft trees, or chains by its own causal pass over its own cache."""
    return "tree" if tree_obstacle(target) is None else "chain"


def tree_obstacle(target: PreTrainedModel) -> str | None:
    """Returns why the target cannot verify a draft tree, to follow its name; `None` where it can."""
    config = target.config.get_text_config(decoder=True)
    unsupported = attention_types(target) - set(ATTENTION_TYPES)
    if is_stateful(target) or unsupported:
        kinds = f"layers of type {', '.join(sorted(unsupported))}" if unsupported else "a recurrent state"
        return f"has {kinds}, whose state cannot hold the branches of a draft tree"
    if not keeps_dynamic_cache(target):
        return "keeps a cache of its own class, whose entries cannot be taken over"
    takes_positions = "position_ids" in inspect.signature(target.forward).parameters
    if not takes_positions or getattr(config, "alibi", False):
        return (
            "is not given the positions of its tokens (its `forward` names no `position_ids`, or ALiBi counts them), "
            "so the branches of a draft tree cannot share positions"
        )
    if getattr(config, "cross_attention_layers", None):
        return (
            "has layers that attend to an image instead of the text, whose keys and values a tree cannot be added to"
        )
    if "local" in getattr(config, "attention_layers", ()):
        return "cuts its local attention windows by cache slot, not by the attention mask"
    if getattr(config, "recurrent_kv_cache_mode", None) == "last_loop" and config.n_recurrent_loops > 1:
        return "has loops of layers that read what the last loop wrote out of the cache themselves"
    return None


def check_target(target: PreTrainedModel) -> None:
    """Raises [`Unsupported`] for a target that can verify neither draft trees nor chains."""
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        raise Unsupported(f"A Gumiho assistant needs a decoder-only target, and {name} is an encoder-decoder.")
    check_adapter(target)
    check_attention(target)
    if cache_class(target) is None:
        raise Unsupported(
            f"{name} has no reusable key-value cache (`{cache_argument(target)}`), which speculative decoding needs. "
            f"Give its `forward` a parameter of that name, or generate without `assistant_model`."
        )
    if target.get_output_embeddings() is None:
        raise Unsupported(f"A Gumiho assistant predicts tokens with the target's output head, and {name} has none.")


def check_adapter(target: PreTrainedModel) -> None:
    """Raises [`Unsupported`] under an adapter of PEFT that puts virtual tokens before the prompt."""
    # For the time of a call, PEFT replaces this method of the target by that of the model around it.
    around = getattr(target.prepare_inputs_for_generation, "__self__", None)
    adapter = getattr(around, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise Unsupported(
            f"{type(adapter).__name__} puts virtual tokens before the prompt, which a Gumiho assistant does not know. "
            f"Call `generate()` within `disable_adapter()`, use an adapter of weights such as LoRA, or generate "
            f"without `assistant_model`."
        )


def check_attention(target: PreTrainedModel) -> None:
    """
    Raises [`Unsupported`] for a target that verifies trees, but not with the attention that it was loaded with. Any
    attention verifies chains.
    """
    if verification_kind(target) == "tree" and (obstacle := tree_attention_obstacle(target)):
        implementation = attention_implementation(target.config.get_text_config(decoder=True))
        raise Unsupported(
            f"{type(target).__name__} cannot verify draft trees with the attention {implementation!r}: {obstacle}. "
            f"{_LOAD_WITH_SDPA}"
        )


_LOAD_WITH_SDPA = "Load it with `attn_implementation='sdpa'`, or call `set_attn_implementation('sdpa')`."


def check_pair(target: PreTrainedModel, drafter: GumihoModel) -> None:
    """Raises [`Unsupported`] where the drafter cannot draft for the target."""
    implementation = attention_implementation(drafter.config.get_text_config())
    if implementation not in MASKED_IMPLEMENTATIONS:
        raise Unsupported(
            f"The drafter's attention {implementation!r} takes no tree mask ({' and '.join(MASKED_IMPLEMENTATIONS)} "
            f"do). {_LOAD_WITH_SDPA}"
        )
    config, draft = target.config.get_text_config(decoder=True), drafter.config.get_text_config()
    for what, ours, theirs in (
        ("vocabulary", draft.vocab_size, config.vocab_size),
        ("hidden size", draft.hidden_size, state_width(config)),
    ):
        if ours != theirs:
            raise Unsupported(
                f"This Gumiho drafter has a {what} of {ours}, but {type(target).__name__} has one of {theirs}. "
                f"Use a drafter that was trained for this target."
            )
    if drafter.config.target_layer_ids is not None:
        find_layers(target, drafter.config.target_layer_ids)


def check_padding(target: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """
    Raises [`Unsupported`] where padding would be read differently in a pass over several tokens.

    GIT widens a padding mask by the tokens of an image, also in a text that has none. MiniMax M3 chooses blocks of
    slots by the positions of tokens, which are not the slots of a padded row: it may choose padding alone, and what it
    then makes of that depends on how many slots a pass sees.

    Args:
        target: The target.
        model_kwargs: As prepared by `generate()`.
    """
    mask = model_kwargs.get("attention_mask")
    if mask is None or mask.ndim != 2 or bool(mask.all()):
        return
    name, rest = type(target).__name__, "Generate them one by one, or without `assistant_model`."
    if target.config.model_type == "git" and model_kwargs.get("pixel_values") is None:
        raise Unsupported(f"{name} cannot verify drafts in a padded batch of texts without images. {rest}")
    if BLOCK_INDEX_KIND in attention_types(target):
        raise Unsupported(
            f"{name} cannot verify drafts in a padded batch: it chooses blocks of its cache as if no row had padding. "
            f"{rest}"
        )


def check_positions(target: PreTrainedModel, position_ids: torch.Tensor, max_new_tokens: int) -> None:
    """
    Raises [`Unsupported`] where what a token sees depends on how far a pass reaches.

    Some rotary embeddings change with the largest position of a pass, and a tree reaches further than plain decoding
    does. Doge attends to `keep_window_size` tokens at most and chooses them by a score. Equal tokens have equal scores
    in its first layer, and which of them it keeps is chance.

    Args:
        position_ids: Those of the prompt.
        max_new_tokens: The most tokens that may follow it.
    """
    config = target.config.get_text_config(decoder=True)
    start = int(position_ids.max()) + 1
    stop = start + max_new_tokens
    kept = getattr(config, "keep_window_size", None)
    if kept is not None and stop - 1 > kept:  # plain decoding does not run the last token
        raise Unsupported(
            f"{type(target).__name__} attends to {kept} tokens at most (`keep_window_size`), and which of equal ones "
            f"it drops is chance. This generation may go from {start} to {stop}. Lower `max_new_tokens` or generate "
            f"without `assistant_model`."
        )
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    # Models with two kinds of attention nest one set of parameters per kind.
    nested = [value for value in parameters.values() if isinstance(value, dict) and "rope_type" in value]
    for rope in nested or [parameters]:
        rope_type = rope.get("rope_type")
        if rope_type not in ("dynamic", "longrope"):
            continue
        limit: int = config.max_position_embeddings
        if rope_type == "longrope":
            limit = rope.get("original_max_position_embeddings", limit)
        if stop > limit and (rope_type == "dynamic" or start <= limit):
            raise Unsupported(
                f"{type(target).__name__} has a {rope_type!r} rotary embedding, which changes at {limit} tokens, and "
                f"this generation may go from {start} to {stop}. Lower `max_new_tokens` or generate without "
                f"`assistant_model`."
            )


def check_text_is_kept(target: PreTrainedModel, cache: Any, length: int, max_new_tokens: int) -> None:
    """
    Raises [`Unsupported`] where plain decoding goes on without the text before.

    Phi's models drop a cache of at most `original_max_position_embeddings` tokens once the text is longer. Phi-3 then
    reads the text again; Phi-4-multimodal reads the newest token alone.

    Args:
        target: The target.
        cache: The caller's, if any.
        length: Tokens of the text so far.
        max_new_tokens: The most tokens that may follow.
    """
    limit = getattr(target.config, "original_max_position_embeddings", None)
    if limit is None:
        return
    num_held = 0 if cache is None else cache.get_seq_length()
    is_crossed = length <= limit < length + max_new_tokens - 1 or 0 < num_held <= limit < length
    if is_crossed and _reads_newest_alone(target, limit):
        raise Unsupported(
            f"{type(target).__name__} drops its cache where a text grows beyond {limit} tokens "
            f"(`original_max_position_embeddings`), and reads the newest token alone. This generation may go from "
            f"{length} to {length + max_new_tokens}. Lower `max_new_tokens`, pass no cache of an earlier turn, or "
            f"generate without `assistant_model`."
        )


def _reads_newest_alone(target: PreTrainedModel, limit: int) -> bool:
    """Returns whether the target gets neither a cache nor the text before, one token beyond the limit."""
    cache, entry = DynamicCache(), torch.zeros(1, 1, 1, 1)
    cache.update(entry, entry, 0)
    ids = torch.zeros(1, limit + 1, dtype=torch.long)
    name = cache_argument(target)
    inputs = target.prepare_inputs_for_generation(
        ids, next_sequence_length=1, attention_mask=torch.ones_like(ids), use_cache=True, **{name: cache}
    )
    return inputs.get(name) is not cache and inputs["input_ids"].shape[1] == 1


def check_cache(target: PreTrainedModel, cache: Any) -> None:
    """Raises [`Unsupported`] for a cache that drafts of the target cannot be verified against."""
    if cache is None:
        return  # the first pass makes what holds states
    layers = getattr(cache, "layers", [])
    is_offloaded = getattr(cache, "offloading", False)
    kind = cache_class(target) or DynamicCache
    if verification_kind(target) == "chain":
        is_usable = isinstance(cache, kind) and not is_offloaded
    else:
        is_usable = is_convertible(cache)
    if is_usable and (unknown := sorted({type(layer).__name__ for layer in layers if not can_be_taken_back(layer)})):
        raise Unsupported(
            f"{type(target).__name__} keeps {', '.join(unknown)} in its cache, of which it is not known how drafts "
            f"are taken back. Generate without `assistant_model`."
        )
    if not is_usable:
        made = "DynamicCache(config=target.config)" if kind is DynamicCache else f"{kind.__name__}(...)"
        raise Unsupported(
            f"A Gumiho assistant needs an ordinary `{kind.__name__}` on the target's device, got "
            f"{type(cache).__name__} with layers {sorted({type(layer).__name__ for layer in layers})}"
            f"{' and offloading' if is_offloaded else ''}. "
            f"Pass `{cache_argument(target)}={made}`, or none; for fixed shapes set "
            f"`cache_implementation='static'` instead of passing a cache."
        )
