"""Runs a benchmark: every mode decodes every prompt, turn by turn of the conversations."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...internals import is_stateful
from ...training.data.bars import progress_bar
from ...training.data.open_text import encode_turn
from ...training.data.run_files import append_rows, complete_lines, cut_incomplete_line
from ..measuring.prompts import Question
from ..measuring.timing import DecodingMode, Runner
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
    journal: Path | None = None,
) -> Iterator[Sample]:
    """
    Answers every question in every mode, and yields the samples.

    Args:
        target: The target, with its `tokenizer`.
        questions: What is asked, for each of the `temperatures` (0 is greedy) and `batch_sizes`.
        modes: Ways of decoding. The first one is plain decoding.
        max_new_tokens: Maximum number of new tokens for each prompt.
        seed: Seed for sampling, set before each mode.
        journal: A JSONL file that receives a line for each batch of conversations. What it has is not measured again.
    """
    batches = [
        _Batch(group[start : start + size], temperature, size)
        for temperature, size in product(temperatures, batch_sizes)
        for group in _by_category(questions)
        for start in range(0, len(group), size)
    ]
    known: dict[str, list[Sample]] = {}
    if journal is not None:
        cut_incomplete_line(journal)
        for row in map(json.loads, complete_lines(journal)):
            known[row["of"]] = [Sample(**sample) for sample in row["samples"]]
    runner = Runner(target, tokenizer.pad_token_id, max_new_tokens, stages=True)
    # Graphs that are compiled for the longest prompts have room for the others.
    longest = sorted((encode_turn(tokenizer, question.turns[:1], []) for question in questions), key=len, reverse=True)
    with progress_bar(total=sum(batch.num_turns for batch in batches), desc="decoding", unit="batch") as bar:
        for number, batch in enumerate(sorted(batches, key=lambda batch: batch.key not in known)):
            if batch.key in known:
                yield from known[batch.key]
                bar.update(batch.num_turns)
            else:
                # Transformers' own drafts one row, and for no recurrent target.
                takes_all = batch.batch_size == 1 and not is_stateful(target)
                fitting = [mode for mode in modes if takes_all or not mode.is_transformers_own]
                runner.warm_up(fitting, longest[: len(batch.questions)], batch.temperature)
                measured: list[Sample] = []
                is_repeated = number % _BATCHES_PER_REPEAT == 0
                for samples in _converse(runner, tokenizer, batch, fitting, seed, is_repeated):
                    yield from samples
                    measured += samples
                    bar.update()
                if journal is not None:
                    append_rows(journal, [{"of": batch.key, "samples": list(map(asdict, measured))}])


def _by_category(questions: Sequence[Question]) -> list[list[Question]]:
    groups = defaultdict(list)
    for question in questions:
        groups[question.category].append(question)
    return list(groups.values())


def _converse(
    runner: Runner,
    tokenizer: PreTrainedTokenizerBase,
    batch: _Batch,
    modes: Sequence[DecodingMode],
    seed: int,
    is_repeated: bool,
) -> Iterator[list[Sample]]:
    """Yields the samples of each turn of a batch. With `is_repeated`, plain decoding begins twice."""
    answers: list[list[str]] = [[] for _ in batch.questions]
    for turn in range(batch.num_turns):
        asked = [index for index, question in enumerate(batch.questions) if turn < len(question.turns)]
        prompts = [encode_turn(tokenizer, batch.questions[i].turns[: turn + 1], answers[i]) for i in asked]
        taken = runner.compare(modes, prompts, batch.temperature, seed + turn)
        repeat_seconds = None
        if is_repeated and turn == 0:
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
