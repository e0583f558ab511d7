"""Measuring the acceptance length of a drafter while it is trained."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel, Trainer, TrainerCallback

from ..model.decoding_settings import NEVER_PAUSES
from ..model.modeling_gumiho import GumihoModel
from ..target.placement import drafter_device


@torch.no_grad()
def measure_acceptance(
    target: PreTrainedModel,
    drafter: GumihoModel,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int = 128,
    **generate_kwargs: Any,
) -> list[list[int]]:
    """
    Generates from each prompt, greedily by default, with the drafter's own decoding settings, except that the drafter
    never pauses.

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
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens, "prompt_lookup_num_tokens": 0}
    settings["return_dict_in_generate"] = True
    lengths = []
    try:
        for prompt in prompts:
            ids = prompt[None].to(drafter_device(target))
            output = target.generate(
                ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, **settings | generate_kwargs
            )
            lengths.append(output.accepted_lengths[0])
    finally:
        own_settings.break_even = break_even
        drafter.train(training)
    return lengths


class AcceptanceCallback(TrainerCallback):
    """
    Measures tau on held-out prompts every `args.acceptance_steps` steps and at the end of training, and logs it as
    `tau`: the mean of the tokens committed per verification cycle, over all cycles. Processes share the prompts.

    Args:
        trainer: The drafter's trainer.
        target: The target.
        prompts: Token ids `(T,)` of each prompt.

    Raises:
        ValueError: The trainer splits the drafter over processes (FSDP, DeepSpeed).
    """

    def __init__(self, trainer: Trainer, target: PreTrainedModel, prompts: Sequence[torch.Tensor]):
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError(
                "Measuring tau needs the whole drafter in each process, and FSDP or DeepSpeed splits it. Set "
                "`acceptance_steps=0`, and measure a checkpoint afterwards."
            )
        self.trainer = trainer
        self.target = target
        self.prompts = prompts
        self._measured_at = -1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measures when it is time."""
        if args.acceptance_steps and state.global_step % args.acceptance_steps == 0:
            self._measure()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measures what training ended with."""
        if state.global_step != self._measured_at:
            self._measure()

    def _measure(self) -> None:
        accelerator = self.trainer.accelerator
        prompts = self.prompts[accelerator.process_index :: accelerator.num_processes]
        max_new_tokens = self.trainer.args.acceptance_max_new_tokens
        lengths = measure_acceptance(self.target, self.trainer.drafter, prompts, max_new_tokens)
        all_lengths = list(chain.from_iterable(gather_object(lengths)))
        self._measured_at = self.trainer.state.global_step
        # Logging clears the order to log, which the losses of this step still wait for.
        should_log = self.trainer.control.should_log
        self.trainer.log({"tau": sum(all_lengths) / max(len(all_lengths), 1)})
        self.trainer.control.should_log = should_log
