"""Times batches that are decoded in several ways, in turns."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, StoppingCriteriaList

from ...generation.drafting.candidate_generator import DraftOrigin
from ...generation.observers import GenerationObserver, Stage, observing
from ...generation.verification.traits import input_device
from ...model.modeling_gumiho import GumihoModel


@dataclass(frozen=True)
class DecodingTime:
    """
    What decoding a batch took.

    Attributes:
        seconds: Time from the end of the prompt's pass to the end of the text. A last cycle that drafts nothing,
            because one token is missing, is left out here and in the next two.
        num_tokens: New tokens of the longest row, without the first one, which comes from the prompt's pass.
        num_passes: Passes of the target: cycles, or steps of plain decoding.
        answers: New tokens of each row, up to its end.
        total_seconds: Time of the call, prompt included.
        accepted_lengths: As the output of `generate()` has them, like `draft_origins`.
        break_even: Tokens that a drafted pass had to commit, if the drafter paused.
        stages: The stages of cycles, where they were timed; see [`StageTimer.stages`].
    """

    seconds: float
    num_tokens: int
    num_passes: int
    answers: list[list[int]] = field(default_factory=list)
    total_seconds: float = 0.0
    accepted_lengths: list[list[int]] | None = None
    draft_origins: list[str] | None = None
    break_even: float | None = None
    stages: dict[str, float] | None = None

    @property
    def pass_seconds(self) -> float:
        """Mean time of a pass. For a cycle, this includes drafting."""
        return self.seconds / self.num_passes


def accelerators_of(*models: PreTrainedModel) -> list[torch.device]:
    """Returns the devices other than the CPU that hold parts of the models."""
    places = [place for model in models for place in (getattr(model, "hf_device_map", None) or {}).values()]
    devices = [torch.device(place) for place in places if place != "disk"] + [input_device(model) for model in models]
    return [device for device in dict.fromkeys(devices) if device.type != "cpu"]


def time_decoding(
    target: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    *,
    settings: Mapping[str, Any] | None = None,
    stages: bool = False,
    **generate_kwargs: Any,
) -> DecodingTime:
    """
    Decodes a batch (`input_ids` and `attention_mask`, `(B, T)` each) and times it. A Gumiho drafter decodes with these
    `settings`. `stages` also times the stages of cycles.
    """
    assistant = generate_kwargs.get("assistant_model")
    drafters = [assistant] if isinstance(assistant, GumihoModel) else []

    # Not a hook on the target: the prompt may take several passes, and a hook would change a compiled pass.
    def note_first_token(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        timer.prompt_end = timer.prompt_end or timer.now()
        return keep_going

    keep_going = torch.zeros(1, dtype=torch.bool, device=inputs["input_ids"].device)
    if not drafters:
        generate_kwargs["stopping_criteria"] = StoppingCriteriaList([note_first_token])
    timer = StageTimer(accelerators_of(target, *drafters), with_stages=stages)
    with temporary_settings(drafters[0], settings or {}) if drafters else nullcontext(), observing(timer):
        output = target.generate(**inputs, return_dict_in_generate=True, **generate_kwargs)
    timer.end = timer.now()
    length = inputs["input_ids"].shape[1]
    ends = target.generation_config.eos_token_id
    num_tokens = output.sequences.shape[1] - length - 1
    num_passes = timer.num_cycles if drafters else num_tokens
    end = timer.end
    if timer.end_of_drafts is not None and num_passes > 1:
        num_tokens, num_passes, end = num_tokens - 1, num_passes - 1, timer.end_of_drafts
    return DecodingTime(
        seconds=end - timer.prompt_end,
        num_tokens=num_tokens,
        num_passes=num_passes,
        answers=[_up_to_end(row[length:], ends) for row in output.sequences.tolist()],
        total_seconds=timer.end - timer.start,
        accepted_lengths=getattr(output, "accepted_lengths", None),
        draft_origins=getattr(output, "draft_origins", None),
        break_even=timer.break_even,
        stages=timer.stages() if stages and drafters else None,
    )


def _up_to_end(tokens: list[int], ends: int | list[int] | None) -> list[int]:
    """Returns the tokens up to the first one that ends a text."""
    last = ends if isinstance(ends, list) else [ends]
    return tokens[: next((index for index, token in enumerate(tokens, 1) if token in last), len(tokens))]


def synchronize(*devices: torch.device) -> None:
    """Waits until the devices have finished their work."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


@contextmanager
def temporary_settings(drafter: GumihoModel, settings: Mapping[str, Any]) -> Iterator[None]:
    """Gives the drafter these decoding settings within a `with` block."""
    config = drafter.generation_config
    before = {name: getattr(config, name, None) for name in settings}
    config.update(**settings)
    try:
        yield
    finally:
        config.update(**before)


class StageTimer(GenerationObserver):
    """
    The times of a generation: its `start`, when the target had read the prompt (`prompt_end`), when nothing more was
    drafted (`end_of_drafts`), and its `end`, which the caller takes. With stages, each stage waits for the `devices`.
    """

    def __init__(self, devices: Sequence[torch.device], with_stages: bool):
        self._devices, self._with_stages = devices, with_stages
        self._seconds = defaultdict[Stage, float](float)
        self._begins: list[float] = []  # of the stages that have not ended
        self.num_cycles = 0
        self.prompt_end = 0.0
        self.end_of_drafts: float | None = None
        self.break_even: float | None = None
        self.start = self.end = self._first_cycle = self.now()

    def on_stage_begin(self, stage: Stage) -> None:
        self.num_cycles += stage == "verify"
        if self._with_stages:
            self._begins.append(self.now())
            if stage == "verify" and self.num_cycles == 1:
                self._first_cycle = self._begins[-1]
                self._seconds.clear()

    def on_stage_end(self, stage: Stage) -> None:
        if stage == "prompt":
            self.prompt_end = self.now()
        if self._with_stages:
            self._seconds[stage] += self.now() - self._begins.pop()

    def on_tree(self, origin: DraftOrigin) -> None:
        if origin.source == "end":
            self.end_of_drafts = self.now()
        if origin.source == "pause":
            self.break_even = origin.break_even

    def now(self) -> float:
        """The clock's time when the devices have finished their work."""
        synchronize(*self._devices)
        return time.perf_counter()

    def stages(self) -> dict[str, float]:
        """
        Returns the seconds before the first cycle ("prompt"), of the target's passes ("verify"), of the drafter's
        ("draft") and of all else ("rest"), and "num_cycles".
        """
        prompt = (self._first_cycle if self.num_cycles else self.end) - self.start
        # If drafting is compiled, it is one function, whose passes are not observed.
        verify, draft = self._seconds["verify"], self._seconds["drafter_pass"] or self._seconds["draft"]
        rest = self.end - self.start - prompt - verify - draft
        return {"prompt": prompt, "verify": verify, "draft": draft, "rest": rest, "num_cycles": self.num_cycles}


Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class DecodingMode:
    """
    One way of decoding: arguments for `generate()` (`generate_kwargs`), and the drafter's `settings` that it changes.
    `is_transformers_own` says that it is assisted generation of transformers' own; `name` is that in reports.
    """

    name: str
    generate_kwargs: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    is_transformers_own: bool = False


PLAIN = DecodingMode("plain")


class Runner:
    """
    Decodes batches in several modes, one after the other, so that a drift of the machine affects all of them. Another
    one comes first each time. `stages` also times the stages of cycles, for which accelerators decode once more.
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
        Returns what each mode took for a batch of prompts. Each mode decodes its first batch twice, to warm up. A
        `temperature` of 0 is greedy. The seed is set before each mode.
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
    """Returns prompts as a batch `(B, T)`. Without a padding token, token 0 pads: it is masked."""
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    ids = pad_sequence(rows, True, pad_token_id or 0, "left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left")
    return {"input_ids": ids, "attention_mask": mask}
