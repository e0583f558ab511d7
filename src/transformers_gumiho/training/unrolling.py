"""A serial head that goes on from its own features at every position of a text at once."""

from typing import Any

import torch
from transformers import DynamicCache


class StepCache(DynamicCache):
    """
    The keys and values of one step of an unrolled text, after those of the steps before it.

    Unlike its base class it is not extended in place, so that a step can be recomputed for the backward pass.
    """

    def __init__(self, earlier: "StepCache | None" = None) -> None:
        super().__init__()
        self._earlier = earlier
        self.of_layer: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._earlier is not None:
            keys, values = self._earlier.of_layer[layer_idx]
            key_states, value_states = torch.cat([keys, key_states], -2), torch.cat([values, value_states], -2)
        self.of_layer[layer_idx] = key_states, value_states
        return key_states, value_states


def unroll_serial_head(
    drafter: Any,
    input_ids: torch.Tensor,
    fused: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """
    Drafts the serial tokens of a [`GumihoModel`], each beyond the first from the feature of the one before it. Layers
    under gradient checkpointing take no cache: there each step also runs the inputs of the steps before it.

    Takes token ids `(B, T)` and the inputs of the first step `(B, T, H)`; all else as `run_serial_head`. Returns the
    features of the first step `(B, T, H)`, those of each step after it, and the path inputs
    `(B, max(T - S, 0), S * H)`.
    """
    num_tokens, serial_tokens = input_ids.shape[1], drafter.config.num_serial_tokens
    checkpointing = drafter.training and any(layer.gradient_checkpointing for layer in drafter.serial_layers)
    cache = None if checkpointing else StepCache()
    mask, positions, window = attention_mask, position_ids, drafter.serial_head.window(drafter.config)
    if positions is None:
        positions = torch.arange(num_tokens, device=fused.device)[None]
    elif cache is not None:  # with one, transformers does not look for texts that are packed into a row
        mask = unrolled_attention_mask(fused, range(1), attention_mask, position_ids, window)
    features = serial_features = drafter.run_serial_head(fused, mask, position_ids, cache, **kwargs)
    unrolled, inputs = [], [fused]
    for step in range(1, serial_tokens):
        count = max(num_tokens - step, 0)
        inputs.append(drafter.fuse(input_ids[:, step:], features[:, :count]))
        if count == 0:  # the text is too short for this step
            unrolled.append(features[:, :0])
            continue
        run = range(0 if cache is None else step, step + 1)
        cache = None if cache is None else StepCache(cache)
        mask = unrolled_attention_mask(fused, run, attention_mask, position_ids, window)
        step_positions = torch.cat([positions[:, : num_tokens - j] + j for j in run], dim=1)
        states = drafter.run_serial_head(torch.cat(inputs[run.start :], dim=1), mask, step_positions, cache, **kwargs)
        features = states[:, states.shape[1] - count :]
        unrolled.append(features)
    num_paths = max(num_tokens - serial_tokens, 0)
    # The next token read with the last step's feature is an input of the parallel heads alone.
    inputs.append(drafter.fuse(input_ids[:, serial_tokens:], features[:, :num_paths]))
    path_inputs = [of_step[:, :num_paths] for of_step in inputs[1:]]
    return serial_features, tuple(unrolled), torch.cat(path_inputs, dim=-1)


def unrolled_attention_mask(
    fused: torch.Tensor,
    steps: range,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    window: int | None = None,
) -> torch.Tensor:
    """
    Returns the mask under which one pass drafts serial tokens of these `steps` at every position of a text:
    `(B or 1, 1, inputs of these steps, inputs of all steps so far)`, 0 where an input may look, the lowest number of
    the dtype where not.

    Step 0 reads the text itself, the T inputs `fused` `(B, T, H)`. Each later step j reads those of positions t < T-j,
    from the drafter's own feature of step j-1. An input of step j at t sees the text up to t and the earlier steps *of
    t*, as in drafting; with a `window`, that many tokens, itself included. A new text, which does not see the last,
    begins where `position_ids` `(B, T)` restart.
    """
    num_tokens, dtype, device = fused.shape[1], fused.dtype, fused.device
    counts = [max(num_tokens - step, 0) for step in range(steps.stop)]
    base = torch.cat([torch.arange(count, device=device) for count in counts])
    step_of = torch.cat([torch.full((count,), step, device=device) for step, count in enumerate(counts)])
    run = slice(sum(counts[: steps.start]), None)
    of_text = (step_of == 0) & (base <= base[run, None])
    of_own_path = (base == base[run, None]) & (step_of <= step_of[run, None])
    allowed = (of_text | of_own_path)[None]
    if window is not None:
        place = base + step_of
        allowed = allowed & (place[run, None] - place < window)
    if position_ids is not None:
        jumps = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1
        texts = jumps.cumsum(dim=-1)[:, base]
        allowed = allowed & (texts[:, None, :] == texts[:, run, None])
    if attention_mask is not None:
        seen = attention_mask.bool()[:, base]
        # Padding sees itself: a row of a softmax that may look nowhere is not a number.
        allowed = allowed & (seen[:, None, :] | of_own_path)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
