"""Continuing a batch of prompts with `generate()`: rows leave the batch as they end."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..internals import CACHE_NAME
from ..target.placement import drafter_device
from .target_features import why_not_finite


# Rows leave after so many tokens. Of SmolLM2's answers a batch of 32 takes 1.01 times as many passes x rows as when
# rows leave at once, and 1.35 times as many where none leaves.
_NUM_TOKENS = 32
# Arguments of `generate()` with which it does not matter that it is called several times.
_STATELESS = {
    "do_sample", "eos_token_id", "logits_processor", "min_p", "pad_token_id", "temperature", "top_k", "top_p",
}  # fmt: skip


@torch.inference_mode()
def continue_rows(
    target: PreTrainedModel,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    ends: set[int],
    pad_token_id: int,
    generate_kwargs: dict[str, Any],
) -> list[list[int]]:
    """
    Returns the tokens that the target writes after each prompt, with the end and without padding after it.

    Args:
        target: The target.
        prompts: Token ids, at least one each.
        max_new_tokens: Tokens to add, at most.
        ends: Tokens that end a row.
        pad_token_id: Fills shorter prompts.
        generate_kwargs: For `generate()`.

    Raises:
        ValueError: What the target computes is not finite.
    """
    longest, device = max(map(len, prompts)), drafter_device(target)
    ids = torch.tensor([[pad_token_id] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    cache = DynamicCache(config=target.config)
    rows_leave = set(generate_kwargs) <= _STATELESS and all(type(layer) is DynamicLayer for layer in cache.layers)
    processors = LogitsProcessorList(
        [partial(_check_finite, target.dtype), *generate_kwargs.get("logits_processor", [])]
    )
    generate_kwargs = generate_kwargs | {"logits_processor": processors} | ({CACHE_NAME: cache} if rows_leave else {})
    found: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    while rows and max_new_tokens > 0:
        num_tokens = min(_NUM_TOKENS, max_new_tokens) if rows_leave else max_new_tokens
        max_new_tokens -= num_tokens
        output = target.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, **generate_kwargs)
        for row, new in zip(rows, output[:, ids.shape[1] :].tolist(), strict=True):
            found[row] += _through_end(new, ends)
        open_rows = [index for index, row in enumerate(rows) if found[row][-1] not in ends]
        if open_rows and max_new_tokens:
            kept = torch.tensor(open_rows)  # in the computer's memory: it indexes layers on several devices
            cache.batch_select_indices(kept)
            mask = torch.nn.functional.pad(mask, (0, output.shape[1] - ids.shape[1]), value=1)[kept.to(device)]
            ids = output[kept.to(output.device)]
        rows = [rows[index] for index in open_rows]
    return found


def _check_finite(dtype: torch.dtype, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if scores.isnan().any():
        raise ValueError(why_not_finite(dtype))
    return scores


def _through_end(ids: list[int], ends: set[int]) -> list[int]:
    return ids[: next((index + 1 for index, token in enumerate(ids) if token in ends), len(ids))]
