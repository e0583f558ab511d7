"""Letting settings decode the same prompts in turns, and seeing which are fastest."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..measuring.timing import time_drafted, time_plain
from ..model.modeling_gumiho import GumihoModel
from .search import TreeSettings


# Decoding without a drafter, among the ways of decoding.
PLAIN = None


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

    Raises:
        ValueError: The texts end with their first token.
    """
    ways = {tree: [tree.as_dict()] * len(prompts) for tree in trees}
    return decode_in_turns(target, drafter, prompts, ways, max_new_tokens, **generate_kwargs)


@torch.inference_mode()
def decode_in_turns(
    target: PreTrainedModel,
    drafter: GumihoModel,
    prompts: Sequence[torch.Tensor],
    ways: Mapping[Any, Sequence[dict[str, Any]]],
    max_new_tokens: int,
    **generate_kwargs: Any,
) -> dict[Any, float]:
    """
    Decodes every prompt in every way and without a drafter.

    Args:
        target: The target.
        drafter: The drafter. Its settings are as before afterwards.
        prompts: Token ids `(T,)` of each prompt.
        ways: Those to compare, each with the drafter's decoding settings for each prompt.
        max_new_tokens: Tokens to generate for each prompt.
        **generate_kwargs: For `generate()`.

    Returns:
        Tokens per second over all prompts, as [`timing`] counts them, of each way and of plain decoding (`PLAIN`).

    Raises:
        ValueError: The texts end with their first token.
    """
    names: list[Hashable] = [PLAIN, *ways]
    seconds, tokens = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens} | generate_kwargs
    # The first prompt once more, before the others: a warm-up.
    turns = [0, *range(len(prompts))]
    for turn, index in enumerate(tqdm(turns, desc="measuring the fastest", unit="prompt")):
        ids = prompts[index][None].to(target.device)
        # Each comes first in its turn: whoever follows a hot processor is not always the same.
        shift = turn % len(names)
        for name in [*names[shift:], *names[:shift]]:
            torch.manual_seed(turn)
            if name is PLAIN:
                taken = time_plain(target, ids, **settings)
            else:
                taken = time_drafted(target, drafter, ids, ways[name][index], **settings)
            if turn:
                seconds[name] += taken.seconds
                tokens[name] += taken.num_tokens
    if not all(tokens.values()):
        raise ValueError("The texts end with their first token. Give other prompts, or more `max_new_tokens`.")
    return {name: tokens[name] / seconds[name] for name in names}
