"""Whether a target computes the same for several tokens behind its cache as for one after the other."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..internals import attention_implementation, cache_argument


NUM_PROMPT_TOKENS = 9
NUM_TOKENS = 6
NUM_PADDED = 2

# What was measured, by class, config and kind of batch. A config alone says which code runs.
_measured: dict[tuple[Any, ...], float] = {}


def check_continuation(target: PreTrainedModel, attention_mask: torch.Tensor | None) -> None:
    """
    Raises `ValueError` for a target whose pass over several tokens is not that over one after the other. The first
    call for a class and config runs the target on a few tokens; later ones look up what was measured.

    Args:
        attention_mask (`(B, T)`, *optional*): Of the prompt: where it has padding, it is tried with padding.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"{type(target).__name__} verifies chains by its own causal mask, so `attention_mask` must be (B, T), got "
            f"{tuple(attention_mask.shape)}."
        )
    is_padded = attention_mask is not None and not bool(attention_mask.all())
    config = target.config
    implementation = attention_implementation(config.get_text_config(decoder=True))
    key = (type(target), config.to_json_string(), implementation, target.dtype, is_padded)
    if key not in _measured:
        _measured[key] = measure_continuation(target, is_padded)
    tolerance = max(torch.finfo(dtype).eps for dtype in (target.dtype, torch.float32)) ** 0.5
    # Not the other way round: nothing is less than not-a-number.
    if not _measured[key] <= tolerance:
        raise ValueError(
            f"{type(target).__name__} cannot verify drafts{' in a padded batch' if is_padded else ''}: what it "
            f"computes for {NUM_TOKENS} tokens at once behind its cache differs from one token after the other by "
            f"{_measured[key]:.1e} of its size, and rounding explains {tolerance:.0e}. Generate without "
            f"`assistant_model`."
        )


def measure_continuation(target: PreTrainedModel, is_padded: bool = False) -> float:
    """
    Returns by how much it differs whether a few tokens are run behind the cache at once or one after the other: the
    root mean square of the difference relative to that of the values, the largest of the logits and of each tensor
    in the cache. (A state that is lost may hardly show in the logits of a model that is not trained.)

    Args:
        target: The target.
        is_padded: Whether to try two rows, the first of which begins with padding.
    """
    device = target.get_input_embeddings().weight.device
    length = NUM_PROMPT_TOKENS + NUM_TOKENS + 1
    num_ids = min(target.config.get_text_config(decoder=True).vocab_size, 97)
    tokens = (torch.arange((1 + is_padded) * length, device=device) * 5 % (num_ids - 1) + 1).view(-1, length)
    mask = torch.ones_like(tokens)
    if is_padded:
        mask[0, :NUM_PADDED] = 0
    # The last token tells whether the state behind the others is the same.
    at_once = _run(target, tokens, mask, [NUM_PROMPT_TOKENS, NUM_TOKENS, 1])
    singly = _run(target, tokens, mask, [NUM_PROMPT_TOKENS, *[1] * (NUM_TOKENS + 1)])
    return max(
        (_difference(*pair) for pair in zip(at_once, singly, strict=True)), key=lambda value: (value != value, value)
    )


def _difference(values: torch.Tensor, expected: torch.Tensor) -> float:
    if values.shape != expected.shape:
        return float("inf")
    values, expected = values.double(), expected.double()
    size = expected.square().mean()
    error = (values - expected).square().mean()
    return (error / size).sqrt().item() if size > 0 else error.sqrt().item()


@torch.no_grad()
def _run(target: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """
    Runs `tokens` in passes of these lengths. Returns the logits of all passes but the first, and what is in the cache
    after the last one.
    """
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)
    takes_positions = "position_ids" in inspect.signature(target.forward).parameters
    logits, stop = [], 0
    for length in lengths:
        start, stop = stop, stop + length
        model_inputs = target.prepare_inputs_for_generation(
            tokens[:, start:stop],
            **{cache_argument(target): cache},
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop] if takes_positions else None,
            use_cache=True,
            is_first_iteration=start == 0,
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = length
        logits.append(target(**model_inputs, return_dict=True).logits)
    return [torch.cat(logits[1:], dim=1), *(tensor for layer in cache.layers for tensor in _tensors(vars(layer)))]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of floating-point numbers in nested containers."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.numel() > 0:
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
