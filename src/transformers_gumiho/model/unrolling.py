"""A serial head that goes on from its own features at every position of a text at once."""

from typing import Any

import torch


def unroll_serial_head(
    drafter: Any,
    input_ids: torch.Tensor,
    fused: torch.Tensor,
    serial_features: torch.Tensor,
    further_steps: int,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """
    Drafts the serial tokens beyond the first, and `further_steps` more, each from the feature of the one before it.

    Each step runs the inputs of the steps before it again, next to its own, instead of keeping their keys and values:
    layers under gradient checkpointing take no cache.

    Args:
        drafter: A [`GumihoModel`].
        input_ids (`(B, T)`): As in its `forward`.
        fused (`(B, T, H)`): The inputs of the first step.
        serial_features (`(B, T, H)`): What it made of them.
        further_steps: Steps beyond those of drafting.
        attention_mask: As in [`GumihoModel.run_serial_head`].
        position_ids (`(B, T)`, *optional*): As there.
        **kwargs: For it.

    Returns:
        The features of each step from the second on, and the path inputs `(B, max(T - S, 0), S * H)`.
    """
    num_tokens, serial_tokens = input_ids.shape[1], drafter.config.num_serial_tokens
    positions = position_ids
    if positions is None:
        positions = torch.arange(num_tokens, device=fused.device)[None]
    features, unrolled, inputs = serial_features, [], [fused]
    for step in range(1, serial_tokens + further_steps):
        count = max(num_tokens - step, 0)
        inputs.append(drafter.fuse(input_ids[:, step:], features[:, :count]))
        mask = unrolled_attention_mask(num_tokens, step + 1, fused.dtype, fused.device, attention_mask, position_ids)
        step_positions = torch.cat([positions[:, : max(num_tokens - j, 0)] + j for j in range(step + 1)], dim=1)
        whole = drafter.run_serial_head(torch.cat(inputs, dim=1), mask, step_positions, **kwargs)
        features = whole[:, whole.shape[1] - count :]
        unrolled.append(features)
    num_paths = max(num_tokens - serial_tokens, 0)
    if not further_steps:
        # The next token read with the last step's feature is an input of the parallel heads alone.
        inputs.append(drafter.fuse(input_ids[:, serial_tokens:], features[:, :num_paths]))
    path_inputs = [of_step[:, :num_paths] for of_step in inputs[1 : serial_tokens + 1]]
    return tuple(unrolled), torch.cat(path_inputs, dim=-1)


def unrolled_attention_mask(
    num_tokens: int,
    num_steps: int,
    dtype: torch.dtype,
    device: torch.device,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Returns the mask under which one pass drafts `num_steps` serial tokens at every position of a text.

    The pass reads `T + (T-1) + ... + (T-num_steps+1)` inputs: those of the text itself, then for each further step j
    the inputs of all positions t < T-j that continue from the drafter's own feature of step j-1. An input of step j
    at t sees the text up to t and the earlier steps *of t*, as it does in drafting.

    Args:
        num_tokens: `T`.
        num_steps: Serial tokens, the first included.
        dtype: Of the mask.
        device: Of the mask.
        attention_mask (`(B, T)`, *optional*): 0 at padding.
        position_ids (`(B, T)`, *optional*): Where they start again, another text begins that sees nothing of the one
            before.

    Returns:
        `(B or 1, 1, inputs, inputs)`: 0 where an input may look, the lowest number of `dtype` where not.
    """
    counts = [max(num_tokens - step, 0) for step in range(num_steps)]
    base = torch.cat([torch.arange(count, device=device) for count in counts])
    steps = torch.cat([torch.full((count,), step, device=device) for step, count in enumerate(counts)])
    of_text = (steps == 0) & (base <= base[:, None])
    of_own_path = (base == base[:, None]) & (steps <= steps[:, None])
    allowed = (of_text | of_own_path)[None]
    if position_ids is not None:
        texts = text_indices(position_ids)[:, base]
        allowed = allowed & (texts[:, None, :] == texts[:, :, None])
    if attention_mask is not None:
        seen = attention_mask.bool()[:, base]
        # Padding sees itself: a row of a softmax that may look nowhere is not a number.
        allowed = allowed & (seen[:, None, :] | of_own_path)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def text_indices(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns, for each of `(B, T)` positions, the number of the text it belongs to in a row of several texts."""
    jumps = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1
    return jumps.cumsum(dim=-1)
