"""The prefill of a generation, as plain decoding runs it."""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ...internals import CACHE_NAME, is_callers_cache, pad_token_id, run_prompt
from ...model.decoding_settings import DraftingSettings
from ...model.target_shape import TargetLayers
from ..tree.uploads import upload
from .chains import ChainCache, ChainSession
from .cycle_shapes import CycleShapes, StaticMemory, cycle_shapes
from .session import TargetOutput, TargetPrompt, TargetSession, text_positions
from .target_states import FeatureReader, TargetStates, begin_capture, end_capture
from .traits import TargetTraits
from .tree_cache import TreeCache


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


def read_prompt(
    model: PreTrainedModel,
    traits: TargetTraits,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    settings: DraftingSettings,
    *,
    max_new_tokens: int,
    layers: TargetLayers | None = None,
) -> TargetSession:
    """
    Runs the prefill as plain `generate()` does, with all tokens in all layers. `input_ids` `(B, T)`, the config and
    `model_kwargs` are as prepared by `generate()`.

    Args:
        settings: The settings of the trees that are verified later.
        max_new_tokens: Most tokens that may follow.
        layers: The layers that the drafter reads.

    Returns:
        The session that continues from here.
    """
    # 1. The prefill gets an ordinary cache.
    name, num_nodes = traits.cache_argument, settings.num_assistant_tokens + 1
    shapes, keeps_cache = _prepare_cache(model, traits, generation_config, model_kwargs, num_nodes)
    cache = model_kwargs[name]
    # 2. What the pass may replace in the arguments is read before it.
    reader = FeatureReader(model, layers)
    mask, position_ids = model_kwargs.get("attention_mask"), prompt_positions(input_ids, model_kwargs)
    outputs, states = _run_prompt(reader, input_ids, generation_config, model_kwargs)
    # 3. The cache that was written. A prefill in chunks puts the cache of the first chunk into the arguments.
    if cache is None or _is_replaced(model, input_ids, model_kwargs | {name: cache}, outputs.get(name), name):
        cache = outputs[name]
    # Not the device of the parameters: a target may be split over devices, and an offloaded one is on "meta".
    device = states.last.device
    batch_size, num_read = states.last.shape[:2]
    position_ids = position_ids.to(device)
    length = _num_entries(traits, cache, mask, num_read)
    # A cache of fixed shapes never grows. Paths longer than a tree's usual ones use the slots of later tokens.
    reserved = max_new_tokens if shapes.are_fixed else min(max_new_tokens, MAX_RESERVED_TOKENS)
    prompt = TargetPrompt(
        length=length,
        mask=None if mask is None or bool(mask.all()) else mask.to(device).bool(),
        next_position=position_ids[..., -1:].expand(*position_ids.shape[:-2], batch_size, 1) + 1,
        cache=cache,
        keeps_cache=keeps_cache,
        num_reserved=shapes.slots_for(length + reserved + num_nodes) - length,
    )
    # 4. The session verifies drafts, with a cache that takes over the entries of the prompt: trees, or chains.
    capacity = length + prompt.num_reserved
    memory = StaticMemory.take(model, batch_size, capacity) if shapes.are_compiled else None
    # Attention scores have the dtype of the keys, which the last states may not have.
    keys = (layer.keys for layer in getattr(cache, "layers", ()) if getattr(layer, "keys", None) is not None)
    dtype = next((tensor.dtype for tensor in keys), states.last.dtype)
    shared = (prompt, max_new_tokens, settings.longest_path + 1, dtype, shapes, memory)
    session: TargetSession
    if traits.is_chain:
        chain_cache = ChainCache(cache, length, batch_size)
        pad_token = pad_token_id(generation_config) or 0
        session = ChainSession(model, traits, model_kwargs, reader, chain_cache, *shared, pad_token)
    else:
        tree_cache = TreeCache.from_dynamic(cache, capacity, prompt.mask, memory)
        if shapes.are_fixed:
            tree_cache.fix_shapes(device)
        session = TargetSession(model, traits, model_kwargs, reader, tree_cache, *shared)
    position_ids = text_positions(position_ids)[:, -num_read:].expand(batch_size, -1)
    session.prefill = TargetOutput(outputs.logits[:, -1:], states, position_ids, outputs.hidden_states)
    return session


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
    reader: FeatureReader, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> tuple[Any, TargetStates]:
    """Returns the target's outputs for the prompt, and its states."""
    config = reader.target.config.get_text_config(decoder=True)
    if getattr(config, "num_kv_shared_layers", 0) and "logits_to_keep" in model_kwargs:
        # If this is a number, decoders whose last layers read the keys and values of earlier layers run these last
        # layers for the last token only. The drafter needs the states of the entire prompt.
        model_kwargs["logits_to_keep"] = upload([-1], input_ids.device)
    with reader.listening():
        begin_capture()
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
    if traits.is_chain:
        # A cache of states counts no tokens. The mask has an entry for each.
        return num_read if mask is None else mask.shape[1]
    traits.check_is_whole(cache)
    length: int = cache.get_seq_length()
    return length
