"""The prefill of a generation, as plain decoding runs it."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ...internals import CACHE_NAME, grows_with_text, is_callers_cache, pad_token_id, run_prompt, updated_kwargs
from ...model.decoding_settings import DraftingSettings
from ..tree.uploads import upload
from .chains import ChainCache, ChainSession
from .cycle_shapes import CycleShapes, cycle_shapes
from .session import ARGUMENTS_OF_PASSES, TargetOutput, TargetPrompt, TargetSession, text_positions
from .takeover import take_over
from .target_memory import StaticMemory
from .target_states import CapturedPass, FeatureReader, TargetStates, begin_capture, end_capture
from .traits import TargetTraits, Unsupported, filled_layers


# Slots to allocate for new tokens; the cache of longer generations grows later.
MAX_RESERVED_TOKENS = 512


def prompt_positions(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """
    Returns the positions `(..., B, T)` of a prompt's tokens; for a target without positions, which the drafter needs,
    as `generate()` counts them for others.
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
    Returns the names of further arguments `(B, T, ...)` that have a value for each token of a pass, such as
    `token_type_ids`. The target's own methods cut them to a pass and make them grow.

    Raises:
        ValueError: An argument is as long as the prompt, and the target does not cut it.
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
    Runs the prefill as plain `generate()` does, with all tokens in all layers. `input_ids` `(B, T)`, the config and
    `model_kwargs` are as prepared by `generate()`.

    Args:
        reader: Reads the target's states.
        settings: The settings of the trees that are verified later.
        max_new_tokens: Most tokens that may follow.
        reads_passes: Whether the drafter reads the states after each pass of a long prompt. What it does not need of
            them is not kept.

    Returns:
        The session that continues from here.
    """
    model, name, num_nodes = reader.target, traits.cache_argument, settings.num_assistant_tokens + 1
    # 1. The prefill gets an ordinary cache.
    shapes, keeps_cache = _prepare_cache(model, traits, generation_config, model_kwargs, num_nodes)
    cache = model_kwargs[name]
    # 2. What the pass may replace in the arguments is read before it.
    mask, position_ids = model_kwargs.get("attention_mask"), prompt_positions(input_ids, model_kwargs)
    of_tokens = arguments_per_token(model, traits, input_ids, model_kwargs)
    read_pass = reader.read_pass if reads_passes else None
    outputs, states = _run_prompt(reader, input_ids, generation_config, model_kwargs, read_pass)
    # Not the device of the parameters: a target may be split over devices, and an offloaded one is on "meta".
    position_ids = position_ids.to(states.last.device)
    # 3. The cache that was written. A prefill in chunks puts the cache of the first chunk into the arguments.
    if _is_replaced(model, input_ids, model_kwargs | {name: cache}, outputs.get(name), name):
        cache = outputs[name]
    num_rows, num_read = states.last.shape[:2]
    length = _num_entries(traits, cache, mask, num_read)
    # A cache of fixed shapes never grows. Paths longer than a tree's usual ones use the slots of later tokens.
    reserved = max_new_tokens if shapes.are_fixed else min(max_new_tokens, MAX_RESERVED_TOKENS)
    num_slots = shapes.slots_for(length + reserved + num_nodes)
    prompt = TargetPrompt(
        length=length,
        mask=None if mask is None or bool(mask.all()) else mask.to(states.last.device).bool(),
        next_position=position_ids[..., -1:].expand(*position_ids.shape[:-2], num_rows, 1) + 1,
        cache=cache,
        keeps_cache=keeps_cache,
        num_reserved=num_slots - length,
    )
    # 4. What plain decoding passes on to its second pass: what grows with the text, and images that were read.
    later_kwargs = updated_kwargs(model, outputs, model_kwargs)
    of_tokens &= later_kwargs.keys()
    later_kwargs |= {argument: later_kwargs[argument][:, -1:] for argument in of_tokens}
    # 5. The session, with a cache that takes over the entries of the prompt.
    memory = StaticMemory.take(model, num_rows, num_slots) if shapes.are_compiled else None
    # Attention scores have the dtype of the keys, which the last states may not have.
    dtype = next((layer.keys.dtype for layer in filled_layers(cache)), states.last.dtype)
    session = (ChainSession if traits.is_chain else TargetSession)(
        model=model,
        traits=traits,
        model_kwargs=later_kwargs,
        kwargs_per_token=of_tokens,
        reader=reader,
        cache=_take_cache(traits, prompt, shapes, num_nodes, memory),
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        max_path=settings.longest_path + 1,
        dtype=dtype,
        shapes=shapes,
        memory=memory,
        pad_token_id=pad_token_id(generation_config) or 0,
    )
    position_ids = text_positions(position_ids)[:, -num_read:].expand(num_rows, -1)
    session.prefill = TargetOutput(outputs.logits[:, -1:], states, position_ids, outputs.hidden_states)
    return session


def _take_cache(
    traits: TargetTraits, prompt: TargetPrompt, shapes: CycleShapes, num_nodes: int, memory: StaticMemory | None
) -> Any:
    """Returns the cache of passes over trees of `num_nodes`, or over chains, with the entries of the prompt."""
    length, num_rows = prompt.length, prompt.next_position.shape[-2]
    if traits.is_chain:
        return ChainCache(prompt.cache, length, num_rows)
    can_rewind = prompt.keeps_cache and num_rows > 1
    in_windows = None if shapes.are_fixed else num_nodes
    cache = take_over(prompt.cache, length + prompt.num_reserved, prompt.mask, memory, length, can_rewind, in_windows)
    if shapes.are_fixed:
        cache.fix_shapes(prompt.next_position.device)
    return cache


def _prepare_cache(
    model: PreTrainedModel,
    traits: TargetTraits,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    num_nodes: int,
) -> tuple[CycleShapes, bool]:
    """Returns the shapes of the cycles, and whether anybody sees the cache after the call."""
    name, returns_dict = traits.cache_argument, bool(generation_config.return_dict_in_generate)
    cache = model_kwargs.get(name)
    is_given = cache is not None and (name != CACHE_NAME or is_callers_cache(cache))
    shapes = cycle_shapes(model, generation_config, model_kwargs, num_nodes)
    if shapes.are_fixed or cache is None:
        # A static one that `generate()` prepared is dropped; unless the prompt is read in chunks, it has taken no
        # memory yet.
        model_kwargs[name] = traits.make_cache()
    return shapes, returns_dict or is_given


def _run_prompt(
    reader: FeatureReader,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    read_pass: Callable[[CapturedPass], CapturedPass] | None = None,
) -> tuple[Any, TargetStates]:
    """Returns the target's outputs for the prompt, and its states."""
    config = reader.target.config.get_text_config(decoder=True)
    if getattr(config, "num_kv_shared_layers", 0) and "logits_to_keep" in model_kwargs:
        # If this is a number, decoders whose last layers read the keys and values of earlier layers run these last
        # layers for the last token only. The drafter needs the states of the entire prompt.
        model_kwargs["logits_to_keep"] = upload([-1], input_ids.device)
    with reader.listening():
        begin_capture(read_pass)
        outputs = run_prompt(reader.target, input_ids, generation_config, model_kwargs)
        return outputs, reader.collect(end_capture())


def _is_replaced(
    model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any], written: Any, name: str
) -> bool:
    """Whether the target replaced its cache on purpose, and not by a `forward` that loses its cache argument."""
    # Phi-3 does when the text outgrows its short rotary embedding.
    given = model_kwargs[name]
    if written is None or written is given:
        return False
    return model.prepare_inputs_for_generation(input_ids, **model_kwargs).get(name) is not given


def _num_entries(traits: TargetTraits, cache: Any, mask: torch.Tensor | None, num_read: int) -> int:
    """Returns the entries of `cache` after a prefill of `num_read` tokens."""
    if not traits.counts_entries:
        # A cache of states counts no tokens. The mask has an entry for each.
        return num_read if mask is None else mask.shape[1]
    traits.check_is_whole(cache)
    length: int = cache.get_seq_length()
    return length
