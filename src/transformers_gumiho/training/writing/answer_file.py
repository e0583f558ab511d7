"""The file of answers: it grows as rows end, in one or several processes, and continues where it was stopped."""

import json
import os
import time
from collections import Counter
from dataclasses import asdict
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ...resumable_file import append_rows, check_begun_with, complete_lines, cut_after, sole_writer
from ...user_errors import UserValueError
from ..data.conversations import MalformedRowError, RawText, read_row
from ..data.rendering import with_template_kwargs
from ..fingerprint import conversations_fingerprint, tokenizer_fingerprints
from .answers import AnswerWriter, WritingSettings
from .requests import Engine


# Batches whose rows are sorted by length together. To 3,784 prompts of people, SmolLM2 wrote 55 tokens/s with equal
# lengths in a batch, and 26 with mixed ones: padding took the rest.
_SORTED_BATCHES = 8
_MANY_CUT = 0.1  # of the answers: they are then mostly beginnings


def processes() -> PartialState:
    """Returns the state of this run's processes, of which the fastest may wait for a day."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=1))


def regenerate_dataset(
    dataset: Dataset,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    output_file: str | Path,
    settings: WritingSettings | None = None,
    *,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> None:
    """
    Writes the dataset again as JSONL, with every assistant turn replaced by what the target says there: after its own
    earlier answers, until it ends, at most `max_new_tokens` tokens, and `max_length` with its prompt. A question
    without an answer is answered, too. Of a raw text, the target continues the first `num_prompt_tokens`, or the
    prompt where there is one.

    A line holds the number of its `row`, the `messages` (or `prompt` and `completion`, or `text`) for people, and the
    `generations` as token ids for training. A row that cannot be answered becomes a line with the reason (`skipped`).

    Stopped, it continues when it is called again. Started with `accelerate launch`, each process writes a share of the
    batches, and the first one puts them together; behind a server, the first one writes alone.

    Args:
        dataset: Rows in any of the forms of [`read_row`].
        engine: Runs the target: a [`LocalEngine`] or a [`ServerEngine`].
        tokenizer: The target's.
        output_file: The new dataset.
        settings: How the target answers.
        chat_template_kwargs: Arguments of the chat template, such as `{"enable_thinking": False}`.

    Raises:
        EndpointError: The server does not answer. What was written stays.
        ValueError: The file was begun with other settings, no row could be answered, or what the target computes is
            not finite.
        OSError: The disk is full, or another run writes there. What was written stays.
    """
    settings, tokenizer = settings or WritingSettings(), with_template_kwargs(tokenizer, chat_template_kwargs)
    state, path = processes(), Path(output_file)
    writer = AnswerWriter(tokenizer, settings)
    part = path if state.is_main_process else path.with_name(f"{path.name}.part{state.process_index}")
    with sole_writer(part):
        if state.is_main_process:
            begun_with = {"rows": conversations_fingerprint(dataset), "target": engine.fingerprint}
            begun_with |= tokenizer_fingerprints(tokenizer) | asdict(settings) | {"batch_size": engine.batch_size}
            check_begun_with(path, begun_with)
            _collect(path)
        state.wait_for_everyone()
        if state.is_main_process or engine.batch_size is not None:
            _write_share(dataset, engine, writer, path, part, state)
        state.wait_for_everyone()
        if state.is_main_process:
            _collect(path)
            _finish(path)
    state.wait_for_everyone()


def _write_share(
    dataset: Dataset, engine: Engine, writer: AnswerWriter, path: Path, part: Path, state: PartialState
) -> None:
    """Writes those rows of this process's batches into `part` that are not in the file yet."""
    done, is_proven = set(), False
    for row in map(json.loads, complete_lines(path)):
        done.add(row["row"])
        is_proven = is_proven or "skipped" not in row
    if engine.batch_size is None:
        batches = [[number for number in range(len(dataset)) if number not in done]]
    else:
        # Each batch is the same whenever and wherever it is written.
        share = _batches(dataset, engine.batch_size)[state.process_index :: state.num_processes]
        batches = [batch for batch in share if not done.issuperset(batch)]
    num_tokens, begin = 0, time.perf_counter()
    num_rows = sum(map(len, batches))
    with tqdm(desc="target answers", total=num_rows, unit="row", disable=part != path) as progress:
        for batch in batches:
            tasks = ((number, writer.write(number, dataset[number])) for number in batch)
            written = engine.run(tasks, is_proven)
            for rows in [list(written)] if engine.batch_size else ([row] for row in written):
                append_rows(part, [row | {"row": number} for number, row in rows])
                num_tokens += sum(len(g["answer_ids"]) for _, row in rows for g in row.get("generations", []))
                progress.set_postfix_str(f"{num_tokens / (time.perf_counter() - begin):.0f} tokens/s")
                progress.update(len(rows))


def _batches(dataset: Dataset, batch_size: int) -> list[list[int]]:
    """Returns the numbers of the rows of each batch: of similar length, and batches of all lengths in every part."""
    lengths, window = list(map(_length, dataset)), _SORTED_BATCHES * batch_size
    numbers = [
        number
        for start in range(0, len(lengths), window)
        for number in sorted(range(start, min(start + window, len(lengths))), key=lengths.__getitem__)
    ]
    return [numbers[start : start + batch_size] for start in range(0, len(numbers), batch_size)]


def _length(row: dict[str, Any]) -> int:
    """Returns the characters of the first prompt of a row, whether or not there is a chat template."""
    try:
        example = read_row(row, has_template=True, answered=False)
    except MalformedRowError:
        return 0
    if isinstance(example, RawText):
        return len(example.completion)
    before = takewhile(lambda message: message["role"] != "assistant", example.messages)
    return sum(len(message["content"] or "") for message in before)


def _collect(path: Path) -> None:
    """Adds what other processes wrote to the file."""
    cut_after(path, len(complete_lines(path)))
    for part in path.parent.glob(f"{path.name}.part*"):
        append_rows(path, map(json.loads, complete_lines(part)))
        part.unlink()


def _finish(path: Path) -> None:
    """Puts the lines of the file into the order of the rows, and says what became of these."""
    found = {row["row"]: (line, row) for line in complete_lines(path) for row in [json.loads(line)]}
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(b"".join(found[number][0] for number in sorted(found)))
    os.replace(unfinished, path)
    rows = [row for _, row in found.values()]
    reasons = Counter(row.get("skipped") or row["left_out"] for row in rows if {"skipped", "left_out"} & {*row})
    ended = [generation["ended"] for row in rows for generation in row.get("generations", [])]
    text = f"{len(rows):,} rows with {len(ended):,} answers. Left out: {count_in_words(reasons)}."
    if not ended:
        raise UserValueError(f"No row could be answered: {text}")
    if (num_cut := ended.count(False)) > _MANY_CUT * len(ended):
        text += f" {num_cut / len(ended):.0%} of the answers were cut at a limit: raise `--max_new_tokens`."
    tqdm.write(text)


def count_in_words(reasons: Counter[str]) -> str:
    """Returns how often each reason was counted."""
    return ", ".join(f"{count} ({reason})" for reason, count in reasons.most_common()) or "none"
