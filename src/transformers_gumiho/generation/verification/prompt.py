"""The prefill of a generation, as plain decoding runs it."""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ...internals import CACHE_NAME, grows_with_text, is_callers_cache, pad_token_id, run_prompt, updated_kwargs
from ...model.decoding_settings import DraftingSettings
from ..tree.uploads import upload
from .chains import ChainCache, ChainSession
from .cycle_shapes import CycleShapes, cycle_shapes
from .session import ARGUMENTS_OF_PASSES, TargetOutput, TargetPrompt, TargetSession
from .takeover import take_over
from .target_memory import StaticMemory
from .target_states import FeatureReader, begin_capture, end_capture
from .traits import TargetTraits, Unsupported


# Slots to allocate for new tokens; the cache of longer generations grows later.
MAX_RESERVED_TOKENS = 512


def prompt_positions(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """
    Returns the positions `(..., B, T)` of a prompt's tokens, as a drafter needs them also where the target takes none.
    """
    if (position_ids := model_kwargs.get("position_ids")) is not None:
        return position_ids
    if (mask := model_kwargs.get("attention_mask")) is not None:
        return (mask.long().cumsum(dim=-1) - 1).clamp_(min=0)
    embeds = model_kwargs.get("inputs_embeds")
    length = input_ids.shape[1] if embeds is None else embeds.shape[1]
    return torch.arange(length, device=input_ids.device).expand(len(input_ids), -1)


def arguments_per_token(
    model: PreTrainedModel, traits: TargetTraits, input_ids: torch.Tensor, model_kwargs: dict[str, Any]
) -> set[str]:
    """
    Returns the names of further arguments `(B, T, ...)` with a value for each token of a pass (`token_type_ids`),
    which the target's own methods cut to a pass and make grow. Raises [`Unsupported`] for one that the target does not
    cut.
    """
    # 1. Tensors as long as the prompt, which may be given by itself, by its mask or by its embeddings.
    sources = (input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds"))
    shapes = {tuple(source.shape[:2]) for source in sources if source is not None}
    candidates = {
        name: value
        for name, value in model_kwargs.items()
        if isinstance(value, torch.Tensor)
        and tuple(value.shape[:2]) in shapes
        # The text that an encoder reads may happen to be as long.
        and not name.startswith("encoder_")
        and name not in ARGUMENTS_OF_PASSES
    }
    if not candidates:
        return set()
    # 2. What the target makes of them for a step of plain decoding.
    further = {name: value for name, value in model_kwargs.items() if name not in ARGUMENTS_OF_PASSES}
    further[traits.cache_argument] = traits.make_cache()
    token = torch.zeros(len(input_ids), 1, dtype=torch.long, device=input_ids.device)
    inputs = model.prepare_inputs_for_generation(token, next_sequence_length=1, **further)
    passed = {name: inputs[name] for name in candidates if inputs.get(name) is not None}
    for name, value in passed.items():
        if value.shape[1] != 1 and not grows_with_text(model, name):
            raise Unsupported(
                f"{traits.name} cannot verify drafts with the argument {name!r}: it is as long as the prompt, "
                f"{tuple(value.shape)}, and what it is for later tokens is unknown. Leave it out, or generate without "
                f"`assistant_model`."
            )
    # Beside a prompt of one token, what has one value need not be the token's.
    return {name for name in passed if candidates[name].shape[1] > 1 or grows_with_text(model, name)}


def open_session(
    reader: FeatureReader,
    traits: TargetTraits,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    settings: DraftingSettings,
    max_new_tokens: int,
    reads_passes: bool = False,
) -> TargetSession:
    """
    Runs the prefill as plain `generate()` does, with all tokens in all layers. Returns the session that continues
    there.

    Args:
        input_ids, generation_config, model_kwargs: As prepared by `generate()`. The ids are `(B, T)`.
        settings: The settings of the trees that are verified later.
        max_new_tokens: Most tokens that may follow.
        reads_passes: Whether the drafter reads the states after each pass of a long prompt. What it does not need of
            them is not kept.
    """
    model, num_nodes = reader.target, settings.num_assistant_tokens + 1
    # 1. The prefill gets an ordinary cache. It may replace what is in the arguments.
    shapes = cycle_shapes(model, generation_config, model_kwargs, num_nodes)
    keeps_cache = _prepare_cache(traits, generation_config, model_kwargs, shapes)
    given, of_tokens = model_kwargs.copy(), arguments_per_token(model, traits, input_ids, model_kwargs)
    outputs, prefill = _run_prompt(reader, input_ids, generation_config, model_kwargs, reads_passes)
    # 2. What it left in the cache.
    prompt = _read_prompt(reader, traits, input_ids, given, outputs, prefill, keeps_cache)
    # 3. What plain decoding passes on to its second pass: what grows with the text, and images that were read.
    later_kwargs = updated_kwargs(model, outputs, model_kwargs)
    of_tokens &= later_kwargs.keys()
    later_kwargs |= {name: later_kwargs[name][:, -1:] for name in of_tokens}
    # 4. A cache that takes over the entries of the prompt. One of fixed shapes never grows, and paths longer than a
    # tree's usual ones use the slots of later tokens.
    num_reserved = max_new_tokens if shapes.are_fixed else min(max_new_tokens, MAX_RESERVED_TOKENS)
    num_slots = shapes.slots_for(prompt.length + num_reserved + num_nodes)
    memory = StaticMemory.take(model, prompt.num_rows, num_slots) if shapes.are_compiled else None
    return (ChainSession if traits.is_chain else TargetSession)(
        reader=reader,
        traits=traits,
        model_kwargs=later_kwargs,
        kwargs_per_token=of_tokens,
        cache=_take_cache(traits, prompt, shapes, num_nodes, num_slots, memory),
        num_reserved=num_slots - prompt.length,
        prompt=prompt,
        prefill=prefill,
        max_new_tokens=max_new_tokens,
        max_path=settings.longest_path + 1,
        shapes=shapes,
        memory=memory,
        pad_token_id=pad_token_id(generation_config) or 0,
    )


def _prepare_cache(
    traits: TargetTraits, generation_config: GenerationConfig, model_kwargs: dict[str, Any], shapes: CycleShapes
) -> bool:
    """Puts an ordinary cache into the arguments. Returns whether anybody sees it after the call."""
    name, returns_dict = traits.cache_argument, bool(generation_config.return_dict_in_generate)
    cache = model_kwargs.get(name)
    is_given = cache is not None and (name != CACHE_NAME or is_callers_cache(cache))
    if shapes.are_fixed or cache is None:
        # A static one that `generate()` prepared is dropped; unless the prompt is read in chunks, it has taken no
        # memory yet.
        model_kwargs[name] = traits.make_cache()
    return returns_dict or is_given


def _run_prompt(
    reader: FeatureReader,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    reads_passes: bool,
) -> tuple[Any, TargetOutput]:
    """Runs the prompt. Returns what the target returned, and its output for the tokens that ran."""
    config = reader.target.config.get_text_config(decoder=True)
    if getattr(config, "num_kv_shared_layers", 0) and "logits_to_keep" in model_kwargs:
        # If this is a number, decoders whose last layers read the keys and values of earlier layers run these last
        # layers for the last token only. The drafter needs the states of the entire prompt.
        model_kwargs["logits_to_keep"] = upload([-1], input_ids.device)
    position_ids = prompt_positions(input_ids, model_kwargs)
    with reader.listening():
        begin_capture(reader.read_pass if reads_passes else None)
        outputs = run_prompt(reader.target, input_ids, generation_config, model_kwargs)
        states = reader.collect(end_capture())
    # Not on the device of the parameters: a target may be split over devices, and an offloaded one is on "meta".
    num_rows, num_read = states.last.shape[:2]
    position_ids = position_ids.to(states.last.device)[..., -num_read:]
    position_ids = position_ids.expand(*position_ids.shape[:-2], num_rows, -1)
    return outputs, TargetOutput(outputs.logits[:, -1:], states, position_ids, outputs.hidden_states)


def _read_prompt(
    reader: FeatureReader,
    traits: TargetTraits,
    input_ids: torch.Tensor,
    given: dict[str, Any],
    outputs: Any,
    prefill: TargetOutput,
    keeps_cache: bool,
) -> TargetPrompt:
    """Returns what a prefill with the arguments `given` has left."""
    name, mask, device = traits.cache_argument, given.get("attention_mask"), prefill.states.last.device
    # 1. The cache that was written. A prefill in chunks puts the cache of the first chunk into the arguments. Phi-3
    # replaces it when the text outgrows its short rotary embedding; a `forward` may also lose its cache argument.
    cache, written = given[name], outputs.get(name)
    if written is not None and written is not cache:
        prepared = reader.target.prepare_inputs_for_generation(input_ids, **given)
        cache = cache if prepared.get(name) is cache else written
    # 2. Its entries. A cache of states counts no tokens; the mask has an entry for each.
    length = prefill.states.last.shape[1] if mask is None else mask.shape[1]
    if traits.windows and not traits.is_chain:
        traits.check_is_whole(cache)
        length = cache.get_seq_length()
    return TargetPrompt(
        length=length,
        mask=None if mask is None or bool(mask.all()) else mask.to(device).bool(),
        next_position=prefill.position_ids[..., -1:] + 1,
        cache=cache,
        keeps_cache=keeps_cache,
    )


def _take_cache(
    traits: TargetTraits,
    prompt: TargetPrompt,
    shapes: CycleShapes,
    num_nodes: int,
    num_slots: int,
    memory: StaticMemory | None,
) -> Any:
    """Returns the cache of passes over trees of `num_nodes`, or over chains, with the entries of the prompt."""
    if traits.is_chain:
        return ChainCache(prompt.cache, prompt.length, prompt.num_rows)
    can_rewind = prompt.keeps_cache and prompt.num_rows > 1
    in_windows = None if shapes.are_fixed else num_nodes
    cache = take_over(prompt.cache, num_slots, prompt.mask, memory, prompt.length, can_rewind, in_windows)
    if shapes.are_fixed:
        cache.fix_shapes(prompt.next_position.device)
    return cache
