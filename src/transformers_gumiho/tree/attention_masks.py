"""Attention masks that let each node of a draft tree see the committed text and its own ancestors."""

from collections.abc import Sequence

import torch

from ..uploads import upload


def block_attention_mask(
    visible: torch.Tensor,
    depths: torch.Tensor,
    lengths: Sequence[int],
    dtype: torch.dtype,
    context_mask: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """
    Returns the attention mask of a block of new tokens that follow a committed context of its own length in each row.

    Args:
        visible (`(B, Q, n)`, bool): Which of the `n` newest slots each of the `Q` queries sees.
        depths (`(B, n)`): Position of each of the newest slots relative to the first of them. The queries are the last
            `Q` of the slots.
        lengths: Committed slots of each row; the new slots of row b start at `lengths[b]`.
        dtype: Dtype of the attention scores, or `torch.bool`.
        context_mask (`(B, max(lengths))`, bool, *optional*): False at committed slots that no query sees (padding).
        window (`int`, *optional*): A query sees slots less than this many positions behind it. Unlimited by default.

    Returns:
        `(B, 1, Q, max(lengths) + n)`: 0 where a query sees a slot, the dtype's minimum where it does not; or true and
        false. `sdpa` and eager attention add a float mask, and eager attention misreads a bool one.
    """
    batch_size, num_queries, num_new = visible.shape
    device, longest = visible.device, max(lengths)
    if context_mask is not None:
        context_mask = context_mask[:, :longest]
    if min(lengths) != longest:
        starts = upload(lengths, device)[:, None]
        return slot_attention_mask(visible, depths, starts, longest + num_new, dtype, context_mask, window)

    seen, hidden = _values(dtype)
    mask = torch.full((batch_size, 1, num_queries, longest + num_new), seen, dtype=dtype, device=device)
    if context_mask is not None:
        mask[:, 0, :, :longest].masked_fill_(~context_mask[:, None], hidden)
    if window is not None:
        query_depths = depths[:, -num_queries:]
        visible = visible & (query_depths[:, :, None] - depths[:, None, :] < window)
        slots = torch.arange(longest, device=device)
        mask[:, 0, :, :longest].masked_fill_(slots <= (longest + query_depths - window)[:, :, None], hidden)
    mask[..., longest:].masked_fill_(~visible[:, None], hidden)
    return mask


def slot_attention_mask(
    visible: torch.Tensor,
    depths: torch.Tensor,
    starts: torch.Tensor,
    num_slots: int,
    dtype: torch.dtype,
    context_mask: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """
    Returns the mask of [`block_attention_mask`], whose arguments it shares, over the first `num_slots` slots of a
    cache, where only the device knows how many of them are committed.

    Args:
        starts (`(B, 1)`): Committed slots of each row.
        num_slots: At least `max(starts) + n`.

    Returns:
        `(B, 1, Q, num_slots)`.
    """
    _, num_queries, num_new = visible.shape
    query_depths = depths[:, -num_queries:]
    if window is not None:
        visible = visible & (query_depths[:, :, None] - depths[:, None, :] < window)
    slots = torch.arange(num_slots, device=visible.device)
    offsets = slots - starts
    in_context = offsets < 0
    if context_mask is not None:
        in_context = in_context & torch.nn.functional.pad(context_mask, (0, num_slots - context_mask.shape[1]))
    in_context = in_context[:, None].expand(-1, num_queries, -1)
    if window is not None:
        in_context = in_context & (slots > (starts + query_depths - window)[:, :, None])
    index = offsets.clamp(0, num_new - 1)[:, None].expand(-1, num_queries, -1)
    in_block = visible.gather(2, index) & ((offsets >= 0) & (offsets < num_new))[:, None]
    seen, hidden = _values(dtype)
    mask = torch.full(in_block.shape, seen, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~(in_context | in_block), hidden)[:, None]


def _values(dtype: torch.dtype) -> tuple[float | bool, float | bool]:
    """Returns a mask's values for slots that are seen and hidden."""
    return (True, False) if dtype is torch.bool else (0.0, torch.finfo(dtype).min)
