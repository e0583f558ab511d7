"""Runs a benchmark: every mode decodes every prompt, turn by turn of the conversations."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..measuring.modes import PLAIN, DecodingMode, Runner
from ..measuring.prompts import Question, encode_turn
from ..measuring.timing import DecodingTime
from ..user_errors import UserValueError
from .journal import Journal
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

    def __post_init__(self) -> None:
        if min(self.temperatures) < 0 or min(*self.batch_sizes, self.max_new_tokens) < 1:
            raise UserValueError(
                f"`temperatures` must not be negative, and `batch_sizes` and `max_new_tokens` must be at least 1, got "
                f"{self.temperatures}, {self.batch_sizes} and {self.max_new_tokens}."
            )


@dataclass(frozen=True)
class _Batch:
    """Conversations that are decoded together."""

    questions: list[Question]
    temperature: float
    batch_size: int

    @property
    def key(self) -> str:
        return conversation_key(self.temperature, self.batch_size, self.questions)

    @property
    def num_turns(self) -> int:
        return max(len(question.turns) for question in self.questions)


class Stopped(KeyboardInterrupt):
    """A benchmark was interrupted. `samples` are those that it had."""

    def __init__(self, samples: list[Sample]):
        super().__init__("Stopped.")
        self.samples = samples


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
        Stopped: The run was interrupted.
        ValueError: The first mode is not plain decoding.
    """
    if not modes or modes[0].name != PLAIN.name:
        raise UserValueError(f"The first mode must be {PLAIN.name!r}, which the others are compared with.")
    batches = list(_batches(questions, settings))
    samples: list[Sample] = []
    run = _Run(target, tokenizer, modes, settings, journal)
    total = sum(batch.num_turns for batch in batches)
    try:
        for measured in tqdm(run.all_samples(batches, questions), total=total, desc="decoding", unit="batch"):
            samples += measured
    except KeyboardInterrupt:
        raise Stopped(samples) from None
    return samples


def _batches(questions: Sequence[Question], settings: BenchmarkSettings) -> Iterator[_Batch]:
    """Yields the conversations in batches, each of one category."""
    groups = defaultdict(list)
    for question in questions:
        groups[question.category].append(question)
    for temperature, batch_size in product(settings.temperatures, settings.batch_sizes):
        for group in groups.values():
            for start in range(0, len(group), batch_size):
                yield _Batch(group[start : start + batch_size], temperature, batch_size)


class _Run:
    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        modes: Sequence[DecodingMode],
        settings: BenchmarkSettings,
        journal: Journal | None,
    ):
        self._runner = Runner(target, tokenizer.pad_token_id, settings.max_new_tokens, stages=True)
        ends = target.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        self._tokenizer, self._modes, self._seed, self._journal = tokenizer, modes, settings.seed, journal
        self._num_measured = 0

    def all_samples(self, batches: Sequence[_Batch], questions: Sequence[Question]) -> Iterator[list[Sample]]:
        """Yields the samples of all modes for one turn after the other, first those that the journal holds."""
        missing = []
        for batch in batches:
            turns: dict[int, list[Sample]] = defaultdict(list)
            # Turns need the answers before them, so the journal holds all turns of a conversation or none.
            for row in self._journal.find(batch.key) if self._journal is not None else []:
                turns[row["turn"]].append(Sample(**row))
            self._num_measured += len(turns)
            yield from turns.values()
            missing += [] if turns else [batch]
        # Graphs that are compiled for the longest prompts have room for the others.
        prompts = sorted((self._encode(q, 0, []) for q in questions), key=len, reverse=True)
        for batch in missing:
            self._runner.warm_up(self._modes_for(batch), prompts[: len(batch.questions)], batch.temperature)
            yield from self._decode(batch)

    def _decode(self, batch: _Batch) -> Iterator[list[Sample]]:
        """Yields the samples of each turn of a batch."""
        answers: list[list[str]] = [[] for _ in batch.questions]
        for turn in range(batch.num_turns):
            asked = [index for index, question in enumerate(batch.questions) if turn < len(question.turns)]
            prompts = [self._encode(batch.questions[index], turn, answers[index]) for index in asked]
            modes = self._modes_for(batch)
            taken = self._runner.compare(modes, prompts, batch.temperature, self._seed + turn)
            length = max(map(len, prompts))
            samples = [
                Sample(
                    mode=mode.name,
                    temperature=batch.temperature,
                    batch_size=batch.batch_size,
                    category=batch.questions[0].category,
                    questions=[batch.questions[index].name for index in asked],
                    turn=turn,
                    seconds=found.total_seconds,
                    num_tokens=sum(map(len, self._answers(found, length))),
                    equal=found.texts == taken[0].texts,
                    peak_bytes=found.peak_bytes,
                    accepted_lengths=found.accepted_lengths,
                    stages=asdict(found.stages) | {"rest": found.stages.rest} if found.stages else None,
                    num_compiled=found.num_compiled,
                )
                for mode, found in zip(modes, taken, strict=True)
            ]
            if self._num_measured % _BATCHES_PER_REPEAT == 0:
                again = self._runner.decode(modes[0], prompts, batch.temperature, self._seed + turn)
                samples[0] = replace(samples[0], repeat_seconds=again.total_seconds)
            self._num_measured += 1
            if self._journal is not None:
                self._journal.append(batch.key, list(map(asdict, samples)), batch.num_turns * len(samples))
            yield samples
            texts = self._tokenizer.batch_decode(self._answers(taken[0], length), skip_special_tokens=True)
            for index, text in zip(asked, texts, strict=True):
                answers[index].append(text)

    def _encode(self, question: Question, turn: int, answers: Sequence[str]) -> list[int]:
        return encode_turn(self._tokenizer, question.turns[: turn + 1], answers)

    def _modes_for(self, batch: _Batch) -> list[DecodingMode]:
        size = batch.batch_size
        return [mode for mode in self._modes if mode.max_batch_size is None or size <= mode.max_batch_size]

    def _answers(self, taken: DecodingTime, length: int) -> list[list[int]]:
        """Returns the new tokens of each row after padded prompts of this length, up to its end."""
        answers = []
        for row in (text[length:] for text in taken.texts):
            stop = next((index + 1 for index, token in enumerate(row) if token in self._ends), len(row))
            answers.append(row[:stop])
        return answers


def conversation_key(temperature: float, batch_size: int, questions: Sequence[Question]) -> str:
    """Returns the key of a batch of conversations at a temperature and batch size."""
    asked = [(question.category, question.name, question.turns) for question in questions]
    return hashlib.sha256(json.dumps([temperature, batch_size, asked]).encode()).hexdigest()[:16]
