"""Ways of decoding, and batches decoded in several of them, in turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ...generation.verification.traits import input_device
from .timing import DecodingTime, accelerators_of, time_decoding


Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class DecodingMode:
    """
    One way of decoding.

    Attributes:
        name: Name in reports.
        generate_kwargs: Arguments for `generate()`.
        settings: Decoding settings of the drafter that this mode changes.
        is_transformers_own: Whether it is assisted generation of transformers' own.
    """

    name: str
    generate_kwargs: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    is_transformers_own: bool = False


PLAIN = DecodingMode("plain")


class Runner:
    """
    Decodes batches in several modes. A drift of the machine affects all modes alike, because they decode each batch
    one after the other, and another one comes first each time: the processor may be cooler then.

    Args:
        target: The target.
        pad_token_id: Pads shorter prompts of a batch.
        max_new_tokens: Maximum number of new tokens of each prompt.
        stages: Also time the stages of cycles. On a CPU this costs nothing; other devices decode once more for it.
    """

    def __init__(
        self, target: PreTrainedModel, pad_token_id: int | None, max_new_tokens: int, *, stages: bool = False
    ):
        self._target, self._pad_token_id, self._max_new_tokens = target, pad_token_id, max_new_tokens
        self._stages = stages
        self._warm: set[tuple[str, int, float]] = set()
        self._num_batches = 0

    def compare(
        self, modes: Sequence[DecodingMode], prompts: Prompts, temperature: float, seed: int
    ) -> list[DecodingTime]:
        """
        Returns what each of the modes took for a batch of prompts, as token ids. Each mode decodes its first batch
        twice, to warm up. A `temperature` of 0 is greedy. The seed is set before each mode.
        """
        self.warm_up(modes, prompts, temperature)
        order = [(place + self._num_batches) % len(modes) for place in range(len(modes))]
        self._num_batches += 1
        taken = {place: self.decode(modes[place], prompts, temperature, seed) for place in order}
        return [taken[place] for place in range(len(modes))]

    def warm_up(self, modes: Sequence[DecodingMode], prompts: Prompts, temperature: float) -> None:
        """Decodes a batch in the modes that have not decoded any of this size at this temperature."""
        for mode in modes:
            if (way := (mode.name, len(prompts), temperature)) not in self._warm:
                self.decode(mode, prompts, temperature, 0)
                self._warm.add(way)

    def decode(self, mode: DecodingMode, prompts: Prompts, temperature: float, seed: int) -> DecodingTime:
        """Decodes a batch in one mode."""
        inputs = pad_left(prompts, self._pad_token_id, input_device(self._target))
        options: dict[str, Any] = {"max_new_tokens": self._max_new_tokens, "do_sample": temperature > 0}
        if temperature:
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        options |= {"settings": mode.settings, **mode.generate_kwargs}
        torch.manual_seed(seed)
        taken = time_decoding(self._target, inputs, stages=self._stages, **options)
        if taken.stages is None or not accelerators_of(self._target):
            return taken
        torch.manual_seed(seed)
        return replace(time_decoding(self._target, inputs, **options), stages=taken.stages)


def pad_left(prompts: Prompts, pad_token_id: int | None, device: torch.device) -> dict[str, torch.Tensor]:
    """
    Returns prompts as one batch, `input_ids` and `attention_mask` `(B, T)`. Without a padding token, token 0 pads: it
    is masked.
    """
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    return {
        "input_ids": pad(rows, padding_value=pad_token_id or 0),
        "attention_mask": pad([torch.ones_like(row) for row in rows]),
    }
