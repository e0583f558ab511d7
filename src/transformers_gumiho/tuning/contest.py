"""Letting trees decode the same prompts in turns, and seeing which is fastest."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..modeling_gumiho import GumihoModel
from .search import TreeSettings
from .timing import time_drafted, time_plain


@torch.inference_mode()
def measure_in_turns(
    target: PreTrainedModel,
    drafter: GumihoModel,
    prompts: Sequence[torch.Tensor],
    trees: Iterable[TreeSettings],
    max_new_tokens: int,
    **generate_kwargs: Any,
) -> dict[TreeSettings | None, float]:
    """
    Decodes every prompt with every tree and without a drafter.

    Args:
        target: The target.
        drafter: The drafter. Its settings are as before afterwards.
        prompts: Token ids `(T,)` of each prompt.
        trees: Those to compare.
        max_new_tokens: Tokens to generate for each prompt.
        **generate_kwargs: For `generate()`.

    Returns:
        Tokens per second over all prompts, as [`timing`] counts them, of each tree and of plain decoding (`None`).
    """
    ways: list[TreeSettings | None] = list(dict.fromkeys([None, *trees]))
    seconds, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens} | generate_kwargs
    # The first prompt once more, before the others: a warm-up.
    for turn, prompt in enumerate(tqdm([prompts[0], *prompts], desc="measuring the fastest", unit="prompt")):
        ids = prompt[None].to(target.device)
        # Each comes first in its turn: whoever follows a hot processor is not always the same.
        shift = turn % len(ways)
        for tree in [*ways[shift:], *ways[:shift]]:
            torch.manual_seed(turn)
            if tree is None:
                taken = time_plain(target, ids, **settings)
            else:
                taken = time_drafted(target, drafter, ids, tree.as_dict(), **settings)
            if turn:
                seconds[tree] += taken.seconds
                tokens[tree] += taken.num_tokens
    if not all(tokens.values()):
        raise ValueError("The texts end with their first token. Give other prompts, or more `max_new_tokens`.")
    return {tree: tokens[tree] / seconds[tree] for tree in ways}
