"""Runs a benchmark: every mode decodes every prompt, in turns, so a drift of the machine affects all modes alike."""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..internals import num_compiled_graphs
from ..measuring.journal import Journal
from ..measuring.prompts import Question, encode_turn, pad_left
from ..measuring.timing import stage_timer, synchronize
from ..user_errors import UserValueError
from ..verification.placement import accelerators_of, input_device
from .memory import peak_memory
from .modes import PLAIN, DecodingMode
from .sample import Sample


# In every fourth batch plain decoding runs twice. The difference of the two times shows whether the machine is idle.
_BATCHES_PER_REPEAT = 4


@dataclass(frozen=True)
class BenchmarkSettings:
    """
    The settings of a benchmark.

    Attributes:
        temperatures: 0 is greedy.
        batch_sizes: Numbers of prompts decoded at once.
        max_new_tokens: Maximum number of new tokens for each prompt.
        seed: Seed for sampling, set before each mode.
    """

    temperatures: tuple[float, ...] = (0.0,)
    batch_sizes: tuple[int, ...] = (1,)
    max_new_tokens: int = 128
    seed: int = 0


@dataclass
class _Batch:
    temperature: float
    batch_size: int
    questions: list[Question]
    inputs: dict[str, torch.Tensor]
    turn: int


@torch.inference_mode()
def run_benchmark(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    modes: Sequence[DecodingMode],
    settings: BenchmarkSettings,
    journal: Journal | None = None,
) -> list[Sample]:
    """
    Decodes every question in every mode. If it is interrupted, it returns the samples so far.

    Args:
        target: The target.
        tokenizer: Its tokenizer.
        questions: The questions to answer.
        modes: Ways of decoding. The first one is plain decoding.
        settings: See [`BenchmarkSettings`].
        journal: Records each sample as soon as it is measured. Samples that it already holds are not measured again.

    Returns:
        The samples.

    Raises:
        ValueError: The first mode is not plain decoding.
    """
    if not modes or modes[0].name != PLAIN:
        raise UserValueError(f"The first mode must be {PLAIN!r}, which the others are compared with.")
    runner = _Runner(target, tokenizer, modes, settings, journal)
    samples: list[Sample] = []
    total = len(settings.temperatures) * sum(
        -(-len(group) // size) * max(len(q.turns) for q in group)
        for size in settings.batch_sizes
        for group in _by_category(questions)
    )
    with suppress(KeyboardInterrupt):
        for measured in tqdm(runner.run(questions), total=total, desc="decoding", unit="batch"):
            samples += measured
    return samples


@dataclass
class _Runner:
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    modes: Sequence[DecodingMode]
    settings: BenchmarkSettings
    journal: Journal | None
    num_batches: int = 0

    def run(self, questions: Sequence[Question]) -> Iterator[list[Sample]]:
        """Yields the samples of all modes for one batch after the other, first those that the journal holds."""
        missing: dict[tuple[float, int], list[list[Question]]] = {}
        for temperature, batch_size in product(self.settings.temperatures, self.settings.batch_sizes):
            for group in _by_category(questions):
                for start in range(0, len(group), batch_size):
                    chosen = group[start : start + batch_size]
                    known = self._find(chosen, temperature, batch_size)
                    yield from known
                    self.num_batches += len(known)
                    if not known:
                        missing.setdefault((temperature, batch_size), []).append(chosen)
        for (temperature, batch_size), conversations in missing.items():
            self._warm_up(questions, temperature, batch_size)
            for chosen in conversations:
                yield from self._run_conversations(chosen, temperature, batch_size)

    def _find(self, questions: list[Question], temperature: float, batch_size: int) -> list[list[Sample]]:
        """Returns the samples of each turn of a conversation; none if any is missing, as turns need the answers."""
        turns = defaultdict(list)
        key = conversation_key(temperature, batch_size, questions)
        for row in self.journal.find(key) if self.journal is not None else []:
            turns[row["turn"]].append(Sample(**row))
        return list(turns.values())

    def _warm_up(self, questions: Sequence[Question], temperature: float, batch_size: int) -> None:
        """Decodes the longest first turns in every mode: graphs compiled for them have room for the others."""
        prompts = [encode_turn(self.tokenizer, question.turns[:1], []) for question in questions]
        longest = sorted(prompts, key=len, reverse=True)[:batch_size]
        batch = _Batch(temperature, batch_size, list(questions[: len(longest)]), self._pad(longest), 0)
        for mode in self._modes_for(batch_size):
            self._decode(mode, batch)

    def _run_conversations(
        self, questions: list[Question], temperature: float, batch_size: int
    ) -> Iterator[list[Sample]]:
        answers: list[list[str]] = [[] for _ in questions]
        num_turns = max(len(question.turns) for question in questions)
        for turn in range(num_turns):
            asked = [index for index, question in enumerate(questions) if turn < len(question.turns)]
            prompts = [encode_turn(self.tokenizer, questions[i].turns[: turn + 1], answers[i]) for i in asked]
            batch = _Batch(temperature, batch_size, [questions[i] for i in asked], self._pad(prompts), turn)
            samples, texts = self._compare(batch)
            if self.journal is not None:
                key = conversation_key(temperature, batch_size, questions)
                self.journal.append(key, list(map(asdict, samples)), num_turns * len(samples))
            yield samples
            for index, text in zip(asked, texts, strict=True):
                answers[index].append(text)

    def _compare(self, batch: _Batch) -> tuple[list[Sample], list[str]]:
        """Decodes a batch in every mode; returns the samples and plain decoding's answers."""
        modes = self._modes_for(batch.batch_size)
        # The modes take turns in coming first, so that a pause or a hot processor does not always affect the same one.
        shift, is_repeated = self.num_batches % len(modes), self.num_batches % _BATCHES_PER_REPEAT == 0
        self.num_batches += 1
        measured = {mode.name: self._measure(mode, batch) for mode in [*modes[shift:], *modes[:shift]]}
        plain, _ = measured[PLAIN]
        samples = []
        for mode in modes:
            output, sample = measured[mode.name]
            samples.append(replace(sample, equal=torch.equal(output.sequences, plain.sequences)))
        if is_repeated:
            samples[0] = replace(samples[0], repeat_seconds=self._measure(modes[0], batch)[1].seconds)
        return samples, self.tokenizer.batch_decode(self._answers(plain, batch), skip_special_tokens=True)

    def _measure(self, mode: DecodingMode, batch: _Batch) -> tuple[Any, Sample]:
        """Decodes a batch; returns what `generate()` returned, and the sample."""
        device, num_graphs = input_device(self.target), num_compiled_graphs()
        devices = accelerators_of(self.target, *([mode.drafter] if mode.drafter is not None else []))
        # On a CPU, timing the stages costs nothing. Other devices decode once more for it.
        has_stages, is_cpu = mode.drafter is not None, not devices
        with peak_memory(device) as peak, stage_timer(*devices, stages=has_stages and is_cpu) as stages:
            synchronize(*devices)
            begin = time.perf_counter()
            output = self._decode(mode, batch)
            synchronize(*devices)
            seconds = time.perf_counter() - begin
        num_compiled = num_compiled_graphs() - num_graphs
        if has_stages and not is_cpu:
            with stage_timer(*devices) as stages:
                self._decode(mode, batch)
        sample = Sample(
            mode=mode.name,
            temperature=batch.temperature,
            batch_size=batch.batch_size,
            category=batch.questions[0].category,
            questions=[question.name for question in batch.questions],
            turn=batch.turn,
            seconds=seconds,
            num_tokens=sum(map(len, self._answers(output, batch))),
            equal=True,
            peak_bytes=peak.num_bytes,
            accepted_lengths=getattr(output, "accepted_lengths", None),
            stages=asdict(stages) | {"rest": stages.rest} if has_stages else None,
            num_compiled=num_compiled,
        )
        return output, sample

    def _decode(self, mode: DecodingMode, batch: _Batch) -> Any:
        torch.manual_seed(self.settings.seed + batch.turn)
        sampling: dict[str, Any] = {"do_sample": False}
        if batch.temperature:
            sampling = {"do_sample": True, "temperature": batch.temperature, "top_k": 0, "top_p": 1.0}
        with mode.active():
            return self.target.generate(
                **batch.inputs,
                max_new_tokens=self.settings.max_new_tokens,
                return_dict_in_generate=True,
                **sampling,
                **mode.generate_kwargs,
            )

    def _modes_for(self, batch_size: int) -> list[DecodingMode]:
        return [mode for mode in self.modes if mode.max_batch_size is None or batch_size <= mode.max_batch_size]

    def _pad(self, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
        return pad_left(prompts, self.tokenizer.pad_token_id, input_device(self.target))

    def _answers(self, output: Any, batch: _Batch) -> list[list[int]]:
        """Returns the new tokens of each row, up to its end."""
        ends = self.target.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        answers = []
        for row in output.sequences[:, batch.inputs["input_ids"].shape[1] :].tolist():
            stop = next((index + 1 for index, token in enumerate(row) if token in ends), len(row))
            answers.append(row[:stop])
        return answers


def _by_category(questions: Sequence[Question]) -> list[list[Question]]:
    groups = defaultdict(list)
    for question in questions:
        groups[question.category].append(question)
    return list(groups.values())


def conversation_key(temperature: float, batch_size: int, questions: Sequence[Question]) -> str:
    """Returns the key of a batch of conversations at a temperature and batch size."""
    asked = [(question.category, question.name, question.turns) for question in questions]
    return hashlib.sha256(json.dumps([temperature, batch_size, asked]).encode()).hexdigest()[:16]
