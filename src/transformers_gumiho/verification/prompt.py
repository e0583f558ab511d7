"""The prefill of a generation, as plain decoding runs it."""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..internals import CACHE_NAME, is_callers_cache, pad_token_id, run_prompt
from ..model.target_shape import TargetLayers
from ..uploads import upload
from ..user_errors import UserValueError
from .chains import ChainCache, ChainSession
from .cycle_shapes import CycleShapes, StaticMemory
from .placement import input_device
from .session import TargetOutput, TargetPrompt, TargetSession, text_positions
from .target_states import FeatureReader, TargetStates, begin_capture, end_capture
from .traits import TargetTraits
from .tree_cache import TreeCache


# Slots to allocate for new tokens; the cache of longer generations grows later.
MAX_RESERVED_TOKENS = 512


def prompt_positions(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """
    Returns the positions `(..., B, T)` of a prompt's tokens. For a target without positions, `generate()` passes none.
    They are then counted as `generate()` counts them for other targets, because the drafter needs them.
    """
    if (position_ids := model_kwargs.get("position_ids")) is not None:
        return position_ids
    if (mask := model_kwargs.get("attention_mask")) is not None:
        return (mask.long().cumsum(dim=-1) - 1).clamp_(min=0)
    embeds = model_kwargs.get("inputs_embeds")
    length = input_ids.shape[1] if embeds is None else embeds.shape[1]
    return torch.arange(length, device=input_ids.device).expand(len(input_ids), -1)


def outlives_call(cache: Any, traits: TargetTraits, generation_config: GenerationConfig) -> bool:
    """Returns whether anybody sees the cache that `generate()` prepared, if any, after the call."""
    if generation_config.return_dict_in_generate:
        return True
    return cache is not None and (traits.cache_argument != CACHE_NAME or is_callers_cache(cache))


def read_prompt(
    model: PreTrainedModel,
    traits: TargetTraits,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    shapes: CycleShapes,
    *,
    keeps_cache: bool,
    max_new_tokens: int,
    num_nodes: int,
    max_path: int,
    layers: TargetLayers | None = None,
) -> tuple["TargetSession", TargetOutput]:
    """
    Runs the prefill as plain `generate()` does, with all tokens in all layers. `input_ids` `(B, T)`, the config and
    `model_kwargs` are as prepared by `generate()`, with the cache for the prompt.

    Args:
        shapes: Shapes of the passes over trees.
        keeps_cache: Whether anybody sees the cache after the call.
        max_new_tokens: Most tokens that may follow.
        num_nodes: Most nodes of a later tree, root included. Longer paths use the slots of later tokens.
        max_path: Most nodes of a path in such a tree.
        layers: The layers that the drafter reads.

    Returns:
        The session that continues from here, and the output for the prompt.
    """
    # 1. What the pass may replace in the arguments is read before it.
    reader, name = FeatureReader(model, layers), traits.cache_argument
    mask, position_ids = model_kwargs.get("attention_mask"), prompt_positions(input_ids, model_kwargs)
    cache = model_kwargs.get(name)
    num_before = 0 if cache is None or traits.is_chain else cache.get_seq_length()
    outputs, states = _run_prompt(model, reader, input_ids, generation_config, model_kwargs)
    # 2. The cache that was written. A prefill in chunks puts the cache of the first chunk into the arguments.
    if cache is None or _is_replaced(model, input_ids, model_kwargs | {name: cache}, outputs.get(name), name):
        cache, num_before = outputs[name], 0
    # Not the device of the parameters: a target may be split over devices, and an offloaded one is on "meta".
    device = states.last.device
    batch_size, num_read = states.last.shape[:2]
    position_ids = position_ids.to(device)
    length = _num_entries(traits, cache, mask, num_read, num_before)
    # A cache of fixed shapes never grows.
    reserved = max_new_tokens if shapes.are_fixed else min(max_new_tokens, MAX_RESERVED_TOKENS)
    prompt = TargetPrompt(
        length=length,
        mask=None if mask is None or bool(mask.all()) else mask.to(device).bool(),
        next_position=position_ids[..., -1:].expand(*position_ids.shape[:-2], batch_size, 1) + 1,
        cache=cache,
        keeps_cache=keeps_cache,
        num_reserved=shapes.slots_for(length + reserved + num_nodes) - length,
    )
    # 3. The session verifies drafts, with a cache that takes over the entries of the prompt: trees, or chains.
    capacity = length + prompt.num_reserved
    memory = StaticMemory.take(model, batch_size, capacity) if shapes.are_compiled else None
    shared = (prompt, max_new_tokens, max_path, _dtype_of_scores(cache, states), shapes, memory)
    session: TargetSession
    if traits.is_chain:
        chain_cache = ChainCache(cache, length, batch_size)
        session = ChainSession(model, traits, model_kwargs, reader, chain_cache, *shared)
        session.pad_token_id = pad_token_id(generation_config) or 0
    else:
        hidden = None if traits.attention.sees_padding else prompt.mask
        tree_cache = TreeCache.from_dynamic(cache, capacity, hidden, memory)
        if shapes.are_fixed:
            tree_cache.fix_shapes(device)
        session = TargetSession(model, traits, model_kwargs, reader, tree_cache, *shared)
    output = TargetOutput(
        logits=outputs.logits[:, -1:],
        states=states,
        position_ids=text_positions(position_ids)[:, -num_read:].expand(batch_size, -1),
        hidden_states=outputs.hidden_states,
    )
    return session, output


def _dtype_of_scores(cache: Any, states: TargetStates) -> torch.dtype:
    """Returns the dtype of the target's attention scores, which its last states may not have."""
    keys = (getattr(layer, "keys", None) for layer in getattr(cache, "layers", ()))
    return next((tensor.dtype for tensor in keys if tensor is not None), states.last.dtype)


def _run_prompt(
    model: PreTrainedModel,
    reader: FeatureReader,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> tuple[Any, TargetStates]:
    """Returns the target's outputs for the prompt, and its states."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_kv_shared_layers", 0) and "logits_to_keep" in model_kwargs:
        # If this is a number, decoders whose last layers read the keys and values of earlier layers run these last
        # layers for the last token only. The drafter needs the states of the entire prompt.
        model_kwargs["logits_to_keep"] = upload([-1], input_ids.device)
    with reader.listening():
        begin_capture()
        outputs = run_prompt(model, input_ids, generation_config, model_kwargs)
        return outputs, reader.collect(end_capture())


@torch.no_grad()
def check_prompt_pass(target: PreTrainedModel, traits: TargetTraits, layers: TargetLayers | None) -> None:
    """
    Runs the target on two tokens.

    Raises:
        ValueError: The pass adds nothing to its cache.
        RuntimeError: The states that the drafter reads cannot be read.
    """
    tokens, cache = torch.zeros(1, 2, dtype=torch.long, device=input_device(target)), traits.make_cache()
    model_kwargs = {traits.cache_argument: cache, "attention_mask": torch.ones_like(tokens), "use_cache": True}
    model_kwargs["position_ids"] = prompt_positions(tokens, model_kwargs)
    _run_prompt(target, FeatureReader(target, layers), tokens, GenerationConfig(), model_kwargs)
    _num_entries(traits, cache, None, 2, 0)


def _is_replaced(
    model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any], written: Any, name: str
) -> bool:
    """
    Returns whether the target replaced the given cache on purpose. Phi-3 does when the text outgrows its short rotary
    embedding. A `forward` that loses its cache argument does not count.
    """
    given = model_kwargs[name]
    if written is None or written is given:
        return False
    return model.prepare_inputs_for_generation(input_ids, **model_kwargs).get(name) is not given


def _num_entries(traits: TargetTraits, cache: Any, mask: torch.Tensor | None, num_read: int, num_before: int) -> int:
    """Returns the entries of `cache` after a prefill of `num_read` tokens; it held `num_before` before."""
    if traits.is_chain:
        # A cache of states counts no tokens. The mask has an entry for each.
        return num_read if mask is None else mask.shape[1]
    length: int = cache.get_seq_length()
    if length <= num_before:
        raise UserValueError(
            f"{traits.name} added nothing to the cache in its argument `{traits.cache_argument}`, the name that this "
            f"release of transformers uses. Give its `forward` a parameter of that name, or generate without "
            f"`assistant_model`."
        )
    return length
