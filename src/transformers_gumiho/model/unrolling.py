"""The attention of a serial head that goes on from its own features at every position of a text at once."""

import torch


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
