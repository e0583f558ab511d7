"""Timing decoding without its prompt, in the same way for what is predicted and for what checks it.

What is timed begins when the target has read the prompt (without a drafter, when it has chosen the first token) and
ends with the text. With a drafter that holds as many drafts as verifications, the first draft included. Every speed is
the tokens after the first, which comes from the prompt, per second of that time.
"""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList

from ..measuring.decoding_settings import decoding_settings
from ..measuring.stages import replace_until_left, synchronize
from ..model.modeling_gumiho import GumihoModel
from ..target.runner import TargetRunner


@dataclass
class DecodingTime:
    """
    One generation, its prompt aside.

    Attributes:
        num_tokens: New tokens after the first.
        seconds: For all of them.
        num_cycles: Passes over draft trees; 0 without a drafter.
        setup_seconds: Before the first pass, where cycles were timed: making ready, and the draft after the prompt.
        verify_seconds: The mean pass, where cycles were timed.
        cycle_seconds: The mean time from the beginning of a pass to that of the next; NaN where there is no next.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    num_cycles: int = 0
    setup_seconds: float = 0.0
    verify_seconds: float = 0.0
    cycle_seconds: float = math.nan


def time_drafted(
    target: PreTrainedModel,
    drafter: GumihoModel,
    ids: torch.Tensor,
    settings: dict[str, Any],
    split: bool = False,
    **generate_kwargs: Any,
) -> DecodingTime:
    """
    Decodes after `ids` `(1, T)` with the drafter under `settings`.

    Args:
        target: The target.
        drafter: The drafter. Its settings are as before afterwards.
        ids: The prompt.
        settings: Decoding settings of the drafter.
        split: Time cycles, and the target's passes in them, which waits for the device twice in each cycle.
        **generate_kwargs: For `generate()`.
    """
    with decoding_settings(drafter, settings), _timer(target.device, split) as taken:
        output = target.generate(ids, assistant_model=drafter, **generate_kwargs)
    taken.num_tokens = output.shape[1] - ids.shape[1] - 1
    return taken


def time_plain(target: PreTrainedModel, ids: torch.Tensor, **generate_kwargs: Any) -> DecodingTime:
    """Decodes after `ids` `(1, T)` without a drafter."""
    begins: list[float] = []

    # Not a hook: what reads a prompt may be several passes, and a compiled pass should stay as it is.
    def note_first_token(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not begins:
            synchronize(target.device)
            begins.append(time.perf_counter())
        return keep_going

    keep_going = torch.zeros(1, dtype=torch.bool, device=ids.device)
    output = target.generate(ids, stopping_criteria=StoppingCriteriaList([note_first_token]), **generate_kwargs)
    synchronize(target.device)
    return DecodingTime(output.shape[1] - ids.shape[1] - 1, time.perf_counter() - begins[0])


@contextmanager
def _timer(device: torch.device, split: bool) -> Iterator[DecodingTime]:
    taken, read_prompt, run_tree = DecodingTime(), TargetRunner.read_prompt, TargetRunner.run_tree
    begin = 0.0
    passes: list[tuple[float, float]] = []  # when each begins and ends

    def timed_prompt(self: TargetRunner, *args: Any) -> Any:
        nonlocal begin
        output = read_prompt(self, *args)
        synchronize(device)
        begin = time.perf_counter()
        return output

    def timed_tree(self: TargetRunner, *args: Any) -> Any:
        taken.num_cycles += 1
        if not split:
            return run_tree(self, *args)
        synchronize(device)
        begin_of_pass = time.perf_counter()
        output = run_tree(self, *args)
        synchronize(device)
        passes.append((begin_of_pass, time.perf_counter()))
        return output

    with ExitStack() as stack:
        replace_until_left(stack, TargetRunner, "read_prompt", timed_prompt)
        replace_until_left(stack, TargetRunner, "run_tree", timed_tree)
        yield taken
        synchronize(device)
        taken.seconds = time.perf_counter() - begin
    if passes:
        begins, ends = zip(*passes, strict=True)
        taken.setup_seconds = begins[0] - begin
        taken.verify_seconds = (sum(ends) - sum(begins)) / len(passes)
        if len(passes) > 1:
            taken.cycle_seconds = (begins[-1] - begins[0]) / (len(passes) - 1)
