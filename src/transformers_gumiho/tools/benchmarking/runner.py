"""Runs a benchmark: every mode decodes every prompt, turn by turn of the conversations."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...commands import UserValueError
from ...internals import is_stateful
from ...training.data.bars import progress_bar
from ...training.data.manifest import begin
from ...training.data.open_text import encode_turn
from ...training.data.run_files import append_rows, complete_lines, cut_incomplete_line
from ..measuring.prompts import Question
from ..measuring.turns import PLAIN, DecodingMode, Runner
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


class Journal:
    """
    A JSONL file with a line for each batch of conversations, written once all its turns are measured. `known` has the
    samples of the file by the key of their batch. `settings` are the conditions of the measurements, kept beside it.

    Raises:
        ValueError: The file was begun with other settings or by another version, or is damaged.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self._path = path
        begin(path, settings, "Begin anew with --restart, or name another --output_dir.")
        cut_incomplete_line(path)
        rows = map(json.loads, complete_lines(path))
        try:
            self.known = {row["of"]: [Sample(**sample) for sample in row["samples"]] for row in rows}
        except (ValueError, KeyError, TypeError) as error:
            raise UserValueError(
                f"{str(path)!r} holds a line that is damaged, or that another version of this package wrote. Begin "
                f"anew with --restart, or name another --output_dir."
            ) from error

    def append(self, key: str, samples: Sequence[Sample]) -> None:
        """Writes the samples of a batch."""
        append_rows(self._path, [{"of": key, "samples": list(map(asdict, samples))}])


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
        ValueError: The first mode is not plain decoding.
    """
    if not modes or modes[0].name != PLAIN.name:
        raise UserValueError(f"The first mode must be {PLAIN.name!r}, which the others are compared with.")
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
    num_turns = 0
    runner = Runner(target, tokenizer.pad_token_id, max_new_tokens, stages=True)
    # Graphs that are compiled for the longest prompts have room for the others.
    longest = sorted((encode_turn(tokenizer, question.turns[:1], []) for question in questions), key=len, reverse=True)
    with progress_bar(total=sum(batch.num_turns for batch in batches), desc="decoding", unit="batch") as bar:
        for batch in sorted(batches, key=lambda batch: batch.key not in known):
            if batch.key in known:
                yield from known[batch.key]
                bar.update(batch.num_turns)
            else:
                fitting = [mode for mode in modes if _takes(mode, target, batch.batch_size)]
                runner.warm_up(fitting, longest[: len(batch.questions)], batch.temperature)
                measured: list[Sample] = []
                for samples in _converse(runner, tokenizer, batch, fitting, seed, num_turns):
                    yield from samples
                    measured += samples
                    bar.update()
                if journal is not None:
                    journal.append(batch.key, measured)
            num_turns += batch.num_turns


def _takes(mode: DecodingMode, target: PreTrainedModel, batch_size: int) -> bool:
    """Whether a mode decodes such a batch: transformers' own takes one row, and no target with recurrent states."""
    return not mode.is_transformers_own or (batch_size == 1 and not is_stateful(target))


def _converse(
    runner: Runner,
    tokenizer: PreTrainedTokenizerBase,
    batch: _Batch,
    modes: Sequence[DecodingMode],
    seed: int,
    num_turns: int,
) -> Iterator[list[Sample]]:
    """Yields the samples of each turn of a batch. `num_turns` were measured before."""
    answers: list[list[str]] = [[] for _ in batch.questions]
    for turn in range(batch.num_turns):
        asked = [index for index, question in enumerate(batch.questions) if turn < len(question.turns)]
        prompts = [encode_turn(tokenizer, batch.questions[i].turns[: turn + 1], answers[i]) for i in asked]
        taken = runner.compare(modes, prompts, batch.temperature, seed + turn)
        repeat_seconds = None
        if (num_turns + turn) % _BATCHES_PER_REPEAT == 0:
            repeat_seconds = runner.decode(modes[0], prompts, batch.temperature, seed + turn).total_seconds
        yield [
            Sample(
                mode=mode.name,
                temperature=batch.temperature,
                batch_size=batch.batch_size,
                category=batch.questions[0].category,
                questions=[batch.questions[index].name for index in asked],
                turn=turn,
                seconds=found.total_seconds,
                num_tokens=sum(map(len, found.answers)),
                equal=found.answers == taken[0].answers,
                accepted_lengths=found.accepted_lengths,
                draft_origins=found.draft_origins,
                break_even=found.break_even,
                stages=found.stages,
                repeat_seconds=repeat_seconds if mode is modes[0] else None,
            )
            for mode, found in zip(modes, taken, strict=True)
        ]
        texts = tokenizer.batch_decode(taken[0].answers, skip_special_tokens=True)
        for index, text in zip(asked, texts, strict=True):
            answers[index].append(text)
