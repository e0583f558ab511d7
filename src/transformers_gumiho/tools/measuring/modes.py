"""Ways of decoding, and batches decoded in several of them, in turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ...generation.verification.placement import accelerators_of, input_device
from .prompts import pad_left
from .timing import DecodingTime, time_decoding


@dataclass(frozen=True)
class DecodingMode:
    """
    One way of decoding.

    Attributes:
        name: Name in reports.
        generate_kwargs: Arguments for `generate()`.
        settings: Decoding settings of the drafter that this mode changes.
        max_batch_size: Largest batch; `None` for any.
    """

    name: str
    generate_kwargs: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    max_batch_size: int | None = None


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
        self, modes: Sequence[DecodingMode], prompts: Sequence[Sequence[int]], temperature: float, seed: int
    ) -> list[DecodingTime]:
        """
        Returns what each of the modes took for a batch. Each mode decodes its first batch twice, to warm up.

        Args:
            modes: The modes.
            prompts: Token ids of each prompt.
            temperature: 0 is greedy.
            seed: Seed for sampling, set before each mode.
        """
        self.warm_up(modes, prompts, temperature)
        order = [(place + self._num_batches) % len(modes) for place in range(len(modes))]
        self._num_batches += 1
        taken = {place: self.decode(modes[place], prompts, temperature, seed) for place in order}
        return [taken[place] for place in range(len(modes))]

    def warm_up(self, modes: Sequence[DecodingMode], prompts: Sequence[Sequence[int]], temperature: float) -> None:
        """Decodes a batch in the modes that have not decoded any of this size at this temperature."""
        for mode in modes:
            if (way := (mode.name, len(prompts), temperature)) not in self._warm:
                self._decode(mode, prompts, temperature, 0)
                self._warm.add(way)

    def decode(
        self, mode: DecodingMode, prompts: Sequence[Sequence[int]], temperature: float, seed: int
    ) -> DecodingTime:
        """Decodes a batch in one mode. The arguments are those of [`compare`]."""
        taken = self._decode(mode, prompts, temperature, seed, stages=self._stages)
        if taken.stages is None or not accelerators_of(self._target):
            return taken
        return replace(self._decode(mode, prompts, temperature, seed), stages=taken.stages)

    def _decode(
        self, mode: DecodingMode, prompts: Sequence[Sequence[int]], temperature: float, seed: int, **timing: bool
    ) -> DecodingTime:
        inputs = pad_left(prompts, self._pad_token_id, input_device(self._target))
        options: dict[str, Any] = {"max_new_tokens": self._max_new_tokens, "do_sample": temperature > 0}
        if temperature:
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
        return time_decoding(self._target, inputs, settings=mode.settings, **timing, **options, **mode.generate_kwargs)
