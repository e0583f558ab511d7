"""Runs a benchmark: every mode decodes every prompt, turn by turn of the conversations."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...commands import UserValueError
from ...model.open_text import encode_turn
from ..measuring.modes import PLAIN, DecodingMode, Runner
from ..measuring.prompts import Question
from ..measuring.timing import DecodingTime
from .journal import Journal
from .summary import Sample


# In every fourth batch plain decoding runs twice. The difference of the two times shows whether the machine is idle.
_BATCHES_PER_REPEAT = 4


@dataclass(frozen=True)
class _Batch:
    """Conversations of one category that are decoded together."""

    questions: list[Question]
    temperature: float
    batch_size: int

    @property
    def key(self) -> str:
        asked = [(question.category, question.name, question.turns) for question in self.questions]
        return hashlib.sha256(json.dumps([self.temperature, self.batch_size, asked]).encode()).hexdigest()[:16]

    @property
    def num_turns(self) -> int:
        return max(len(question.turns) for question in self.questions)


@torch.inference_mode()
def run_benchmark(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    modes: Sequence[DecodingMode],
    *,
    temperatures: Sequence[float] = (0.0,),
    batch_sizes: Sequence[int] = (1,),
    max_new_tokens: int = 128,
    seed: int = 0,
    journal: Journal | None = None,
) -> Iterator[Sample]:
    """
    Decodes every question in every mode, and yields the samples.

    Args:
        target: The target.
        tokenizer: Its tokenizer.
        questions: The questions to answer.
        modes: Ways of decoding. The first one is plain decoding.
        temperatures: 0 is greedy.
        batch_sizes: Numbers of prompts decoded at once.
        max_new_tokens: Maximum number of new tokens for each prompt.
        seed: Seed for sampling, set before each mode.
        journal: Records the samples of each conversation. Those that it already holds are not measured again.

    Raises:
        ValueError: The first mode is not plain decoding, or a setting is out of range.
    """
    if not modes or modes[0].name != PLAIN.name:
        raise UserValueError(f"The first mode must be {PLAIN.name!r}, which the others are compared with.")
    are_temperatures = all(0 <= temperature < math.inf for temperature in temperatures)
    if not are_temperatures or min(*batch_sizes, max_new_tokens) < 1:
        raise UserValueError(
            f"`temperatures` must be 0 or positive, and `batch_sizes` and `max_new_tokens` must be at least 1, got "
            f"{tuple(temperatures)}, {tuple(batch_sizes)} and {max_new_tokens}."
        )
    groups = defaultdict(list)
    for question in questions:
        groups[question.category].append(question)
    batches = [
        _Batch(group[start : start + size], temperature, size)
        for temperature, size in product(temperatures, batch_sizes)
        for group in groups.values()
        for start in range(0, len(group), size)
    ]
    known = {} if journal is None else journal.known
    runner = Runner(target, tokenizer.pad_token_id, max_new_tokens, stages=True)
    ends = target.generation_config.eos_token_id
    run = _Run(runner, tokenizer, set(ends if isinstance(ends, list) else [ends]), seed)
    # Graphs that are compiled for the longest prompts have room for the others.
    longest = sorted((encode_turn(tokenizer, question.turns[:1], []) for question in questions), key=len, reverse=True)
    with tqdm(total=sum(batch.num_turns for batch in batches), desc="decoding", unit="batch") as bar:
        for batch in sorted(batches, key=lambda batch: batch.key not in known):
            if batch.key in known:
                yield from known[batch.key]
                run.num_measured += batch.num_turns
                bar.update(batch.num_turns)
                continue
            fitting = [mode for mode in modes if batch.batch_size <= (mode.max_batch_size or batch.batch_size)]
            runner.warm_up(fitting, longest[: len(batch.questions)], batch.temperature)
            measured: list[Sample] = []
            for samples in run.converse(batch, fitting):
                yield from samples
                measured += samples
                bar.update()
            if journal is not None:
                journal.append(batch.key, measured)


@dataclass
class _Run:
    runner: Runner
    tokenizer: PreTrainedTokenizerBase
    ends: set[int]
    seed: int
    num_measured: int = 0

    def converse(self, batch: _Batch, modes: Sequence[DecodingMode]) -> Iterator[list[Sample]]:
        """Yields the samples of each turn of a batch."""
        answers: list[list[str]] = [[] for _ in batch.questions]
        for turn in range(batch.num_turns):
            asked = [index for index, question in enumerate(batch.questions) if turn < len(question.turns)]
            names = [batch.questions[index].name for index in asked]
            prompts = [
                encode_turn(self.tokenizer, batch.questions[index].turns[: turn + 1], answers[index])
                for index in asked
            ]
            taken = self.runner.compare(modes, prompts, batch.temperature, self.seed + turn)
            length = max(map(len, prompts))
            samples = [
                Sample(
                    mode=mode.name,
                    temperature=batch.temperature,
                    batch_size=batch.batch_size,
                    category=batch.questions[0].category,
                    questions=names,
                    turn=turn,
                    seconds=found.total_seconds,
                    num_tokens=sum(map(len, self._answers(found, length))),
                    equal=found.texts == taken[0].texts,
                    peak_bytes=found.peak_bytes,
                    accepted_lengths=found.accepted_lengths,
                    stages=found.stages,
                    num_compiled=found.num_compiled,
                )
                for mode, found in zip(modes, taken, strict=True)
            ]
            if self.num_measured % _BATCHES_PER_REPEAT == 0:
                again = self.runner.decode(modes[0], prompts, batch.temperature, self.seed + turn)
                samples[0] = replace(samples[0], repeat_seconds=again.total_seconds)
            self.num_measured += 1
            yield samples
            texts = self.tokenizer.batch_decode(self._answers(taken[0], length), skip_special_tokens=True)
            for index, text in zip(asked, texts, strict=True):
                answers[index].append(text)

    def _answers(self, taken: DecodingTime, length: int) -> list[list[int]]:
        """Returns the new tokens of each row after padded prompts of this length, up to its end."""
        answers = []
        for row in (text[length:] for text in taken.texts):
            stop = next((index + 1 for index, token in enumerate(row) if token in self.ends), len(row))
            answers.append(row[:stop])
        return answers
