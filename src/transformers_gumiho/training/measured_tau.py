"""Measuring the acceptance length of a drafter while it is trained."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from ..model.decoding_settings import NEVER_PAUSES
from ..model.modeling_gumiho import GumihoModel
from ..verification.placement import input_device


@torch.no_grad()
def measure_acceptance(
    target: PreTrainedModel,
    drafter: GumihoModel,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int = 128,
    **generate_kwargs: Any,
) -> list[list[int]]:
    """
    Generates from each prompt, greedily by default, with the drafter's own settings, but without pauses.

    Args:
        target: The target.
        drafter: The drafter, or a `PeftModel` around one.
        prompts: Token ids `(T,)` of each prompt.
        max_new_tokens: Tokens to generate for each.
        **generate_kwargs: For `generate()`.

    Returns:
        For each prompt, the tokens that each cycle committed. Tau is their mean.
    """
    training, own_settings = drafter.training, drafter.generation_config
    drafter.eval()
    break_even = getattr(own_settings, "break_even", None)
    own_settings.break_even = NEVER_PAUSES
    # What is trained is the drafter, whatever the context would draft.
    settings = {"do_sample": False, "prompt_lookup_num_tokens": 0, "return_dict_in_generate": True} | generate_kwargs
    settings |= {"max_new_tokens": max_new_tokens, "assistant_model": drafter}
    lengths = []
    try:
        for prompt in prompts:
            ids = prompt[None].to(input_device(target))
            output = target.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            lengths.append(output.accepted_lengths[0])
    finally:
        own_settings.break_even = break_even
        drafter.train(training)
    return lengths


def shared_tau(
    target: PreTrainedModel,
    drafter: GumihoModel,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    processes: Accelerator,
) -> float:
    """Returns the mean number of tokens per cycle on prompts that the processes share; see [`measure_acceptance`]."""
    mine = prompts[processes.process_index :: processes.num_processes]
    lengths = gather_object(measure_acceptance(target, drafter, mine, max_new_tokens))
    every = [length for of_prompt in lengths for length in of_prompt]
    return sum(every) / max(len(every), 1)
