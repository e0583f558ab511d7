"""The prompt of a generation: read as plain decoding reads it, and handed over to a session."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..internals import cache_argument, run_prompt
from .chain_cache import ChainCache
from .chain_session import ChainSession
from .cycle_shapes import CycleShapes
from .feature_reader import FeatureReader, TargetStates, begin_capture, end_capture
from .own_caches import make_cache
from .requirements import verification_kind
from .session import TargetOutput, TargetPrompt, TargetSession, text_positions
from .static_memory import StaticMemory
from .tree_cache import TreeCache
from .verification_cache import VerificationCache


# Slots allocated for new tokens at once; the cache of longer generations grows when they get there.
MAX_RESERVED_TOKENS = 512


def prompt_positions(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """
    Returns the positions `(..., B, T)` of a prompt's tokens. A target that takes none from outside gets none from
    `generate()`; the drafter counts them as `generate()` does for the others.
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
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    num_nodes: int,
    max_new_tokens: int,
    shapes: CycleShapes,
    layer_ids: Sequence[int] | None = None,
) -> tuple["TargetSession", TargetOutput]:
    """
    Runs the prompt as plain `generate()` does, and all of it through all layers.

    Args:
        model: The target.
        input_ids (`(B, T)`): As prepared by `generate()`.
        generation_config: As prepared by `generate()`.
        model_kwargs: As prepared by `generate()`, with the cache that the prompt goes through.
        num_nodes: The most nodes of a later tree, root included. Longer paths take the place of tokens to come.
        max_new_tokens: The most tokens that may follow.
        shapes: What the passes over trees run in.
        layer_ids: Of the layers that the drafter reads, where they are not the last one alone.

    Returns:
        The session that goes on from here, and what the target computed.
    """
    reader = FeatureReader(model, layer_ids)
    # What they are before the pass, which may put others in their places.
    mask, position_ids = model_kwargs.get("attention_mask"), prompt_positions(input_ids, model_kwargs)
    caller_cache = model_kwargs.get(cache_argument(model))
    num_before = (
        caller_cache.get_seq_length() if caller_cache is not None and verification_kind(model) == "tree" else 0
    )
    outputs, states = _run_prompt(model, reader, input_ids, generation_config, model_kwargs)
    # A prompt that is read in chunks puts the cache of the first chunk into the arguments.
    given = model_kwargs | {cache_argument(model): caller_cache}
    if caller_cache is None or _is_replaced(model, input_ids, given, outputs):
        caller_cache, num_before = outputs[cache_argument(model)], 0
    # A target split over devices moves its inputs itself; the parameters of an offloaded one are nowhere.
    device = states.last.device
    batch_size, num_read = states.last.shape[:2]
    position_ids = position_ids.to(device)
    length = _num_entries(model, caller_cache, mask, num_read, num_before)
    # A cache of fixed shapes never grows.
    reserved = max_new_tokens if shapes.are_fixed else min(max_new_tokens, MAX_RESERVED_TOKENS)
    prompt = TargetPrompt(
        length=length,
        mask=None if mask is None or bool(mask.all()) else mask.to(device).bool(),
        next_position=position_ids[..., -1:].expand(*position_ids.shape[:-2], batch_size, 1) + 1,
        cache=caller_cache,
        num_reserved=shapes.slots_for(length + reserved + num_nodes) - length,
    )
    memory = None
    if shapes.are_compiled:
        memory = StaticMemory.take(model, batch_size, prompt.length + prompt.num_reserved)
    session_class, cache = _verification(model, prompt, batch_size, shapes, device, memory)
    session = session_class(
        model, model_kwargs, reader, cache, prompt, max_new_tokens, states.last.dtype, shapes, memory
    )
    output = TargetOutput(
        logits=outputs.logits[:, -1:],
        states=states,
        position_ids=text_positions(position_ids)[:, -num_read:].expand(batch_size, -1),
        hidden_states=outputs.hidden_states,
    )
    return session, output


def _run_prompt(
    model: PreTrainedModel,
    reader: FeatureReader,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> tuple[Any, TargetStates]:
    """Returns what the target returns for the prompt, and its states."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_kv_shared_layers", 0) and "logits_to_keep" in model_kwargs:
        # With a number here, decoders whose last layers read the keys and values of earlier ones run these on the
        # last token alone; the drafter wants the states of the whole prompt.
        model_kwargs["logits_to_keep"] = torch.tensor([-1])
    with reader.listening():
        begin_capture()
        outputs = run_prompt(model, input_ids, generation_config, model_kwargs)
        return outputs, reader.collect(end_capture())


@torch.no_grad()
def check_prompt_pass(target: PreTrainedModel, layer_ids: Sequence[int] | None) -> None:
    """
    Runs the target on two tokens.

    Raises:
        ValueError: The pass leaves nothing in the cache that the target is given.
        RuntimeError: The states that the drafter reads cannot be read.
    """
    tokens = torch.zeros(1, 2, dtype=torch.long, device=target.device)
    cache = make_cache(target)
    model_kwargs = {cache_argument(target): cache, "attention_mask": torch.ones_like(tokens), "use_cache": True}
    model_kwargs["position_ids"] = prompt_positions(tokens, model_kwargs)
    _run_prompt(target, FeatureReader(target, layer_ids), tokens, GenerationConfig(), model_kwargs)
    _num_entries(target, cache, None, 2, 0)


def _is_replaced(model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any], outputs: Any) -> bool:
    """
    Returns whether the target read the prompt into a cache of its own on purpose. Phi-3 hands on no cache of at most
    as many tokens as its short rotary embedding has, once the text has more. A `forward` that loses what it is handed
    is something else.
    """
    name = cache_argument(model)
    written, given = outputs.get(name), model_kwargs.get(name)
    if written is None or written is given:
        return False
    return model.prepare_inputs_for_generation(input_ids, **model_kwargs).get(name) is not given


def _num_entries(model: PreTrainedModel, cache: Any, mask: torch.Tensor | None, num_read: int, num_before: int) -> int:
    """Returns the tokens that the prompt's pass, of `num_read`, has left in `cache`, which held `num_before`."""
    if verification_kind(model) == "tree":
        if cache.get_seq_length() <= num_before:
            raise ValueError(
                f"{type(model).__name__} has added nothing to the cache that it was given as "
                f"`{cache_argument(model)}`, the name by which this release of transformers hands it on. Give its "
                f"`forward` a parameter of that name, or generate without `assistant_model`."
            )
        return cache.get_seq_length()
    # A cache that holds states alone counts none; the mask has an entry for each.
    return num_read if mask is None else mask.shape[1]


def _verification(
    model: PreTrainedModel,
    prompt: TargetPrompt,
    batch_size: int,
    shapes: CycleShapes,
    device: torch.device,
    memory: StaticMemory | None,
) -> tuple[type[TargetSession], VerificationCache]:
    """Returns how drafts are verified, and the cache for it, which takes over the entries of the prompt."""
    if verification_kind(model) == "chain":
        return ChainSession, ChainCache(prompt.cache, prompt.length, batch_size)
    cache = TreeCache.from_dynamic(prompt.cache, prompt.length + prompt.num_reserved, prompt.mask, memory)
    if shapes.are_fixed:
        cache.fix_shapes(device)
    return TargetSession, cache
