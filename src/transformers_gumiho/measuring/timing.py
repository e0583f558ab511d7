"""Timing decoding without its prompt.

What is timed begins when the target has read the prompt (without a drafter, when it has chosen the first token) and
ends with the text. With a drafter that holds as many drafts as verifications, the first draft included. Every speed is
the tokens after the first, which comes from the prompt, per second of that time.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList

from ..decoding.observers import GenerationObserver, Stage, observing
from ..model.modeling_gumiho import GumihoModel
from .decoding_settings import decoding_settings
from .stages import synchronize


@dataclass
class DecodingTime:
    """
    One generation, its prompt aside.

    Attributes:
        num_tokens: New tokens after the first.
        seconds: For all of them.
        num_cycles: Passes over draft trees; 0 without a drafter.
        verify_seconds: The mean pass, where cycles were timed.
        cycle_seconds: The mean time from the beginning of a pass to that of the next; NaN where there is no next.
        sequences (`(B, T)`): The texts, prompts included.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    num_cycles: int = 0
    verify_seconds: float = 0.0
    cycle_seconds: float = math.nan
    sequences: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))


def time_drafted(
    target: PreTrainedModel,
    drafter: GumihoModel,
    ids: torch.Tensor,
    settings: dict[str, Any],
    split: bool = False,
    attention_mask: torch.Tensor | None = None,
    **generate_kwargs: Any,
) -> DecodingTime:
    """
    Decodes after `ids` `(B, T)` with the drafter under `settings`.

    Args:
        target: The target.
        drafter: The drafter. Its settings are as before afterwards.
        ids: The prompts.
        settings: Decoding settings of the drafter.
        split: Time cycles, and the target's passes in them, which waits for the device twice in each cycle.
        attention_mask (`(B, T)`): 0 where rows are padded; by default nowhere.
        **generate_kwargs: For `generate()`.
    """
    with decoding_settings(drafter, settings), _timer(target.device, split) as taken:
        mask = _mask_of(ids, attention_mask)
        output = target.generate(ids, attention_mask=mask, assistant_model=drafter, **generate_kwargs)
    taken.num_tokens, taken.sequences = output.shape[1] - ids.shape[1] - 1, output
    return taken


def time_plain(
    target: PreTrainedModel, ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **generate_kwargs: Any
) -> DecodingTime:
    """Decodes after `ids` `(B, T)`, padded where `attention_mask` is 0, without a drafter."""
    begins: list[float] = []

    # Not a hook: what reads a prompt may be several passes, and a compiled pass should stay as it is.
    def note_first_token(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not begins:
            synchronize(target.device)
            begins.append(time.perf_counter())
        return keep_going

    keep_going = torch.zeros(1, dtype=torch.bool, device=ids.device)
    output = target.generate(
        ids, attention_mask=_mask_of(ids, attention_mask), stopping_criteria=StoppingCriteriaList([note_first_token]),
        **generate_kwargs,
    )  # fmt: skip
    synchronize(target.device)
    seconds = time.perf_counter() - begins[0]
    return DecodingTime(output.shape[1] - ids.shape[1] - 1, seconds, sequences=output)


def _mask_of(ids: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    # Without a mask a text whose last token also stands for padding would be taken for padded.
    return torch.ones_like(ids) if given is None else given


@contextmanager
def _timer(device: torch.device, split: bool) -> Iterator[DecodingTime]:
    taken, timer = DecodingTime(), _CycleTimer(device, split)
    with observing(timer):
        yield taken
    synchronize(device)
    taken.seconds = time.perf_counter() - timer.begin
    taken.num_cycles = timer.num_cycles
    if timer.passes:
        begins, ends = zip(*timer.passes, strict=True)
        taken.verify_seconds = (sum(ends) - sum(begins)) / len(begins)
        if len(begins) > 1:
            taken.cycle_seconds = (begins[-1] - begins[0]) / (len(begins) - 1)


class _CycleTimer(GenerationObserver):
    """
    Takes note of when the prompt has been read.

    Args:
        device: The target's.
        split: Take note of when each pass over a tree begins and ends, too.
    """

    def __init__(self, device: torch.device, split: bool):
        self.device = device
        self.split = split
        self.begin = 0.0
        self.num_cycles = 0
        self.passes: list[tuple[float, float]] = []
        self._begin_of_pass = 0.0

    def on_stage_begin(self, stage: Stage) -> None:
        if stage == "verify":
            self.num_cycles += 1
            if self.split:
                self._begin_of_pass = self._now()

    def on_stage_end(self, stage: Stage) -> None:
        if stage == "prompt":
            self.begin = self._now()
        elif stage == "verify" and self.split:
            self.passes.append((self._begin_of_pass, self._now()))

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()
