"""Prompts: questions of one or several turns, in categories."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from ...commands import UserValueError
from ...files import MalformedRowError, load_conversations, parse_row, read_json_lines


logger = logging.get_logger(__name__)

# The published files of SPEED-Bench hold this in place of texts that it may not distribute.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class Question:
    """
    The turns of a user in a conversation.

    Attributes:
        name: Its id.
        category: The group of questions to which it belongs.
        turns: The user's side of the conversation.
    """

    name: str
    category: str
    turns: tuple[str, ...]


def read_prompts(name: str, *, num_prompts: int | None = None, per_category: int | None = None) -> list[Question]:
    """
    Reads questions, also from the published files of Spec-Bench (`question.jsonl`) and SPEED-Bench (Parquet, or
    `"nvidia/SPEED-Bench:qualitative"`). Rows whose publisher left a placeholder for the text are left out.

    Args:
        name: A JSONL, JSON or Parquet file, or a dataset: a folder or a name on the Hub, which may end in `:` and the
            name of a config. All but JSONL need the `datasets` library. A row has `turns` (a list of texts), `prompt`
            or `text`, and maybe `category` and `question_id`. Of several splits, `test` is read, or else the first.
        num_prompts: Maximum number of questions. By default all.
        per_category: Maximum number of questions per category. By default all.

    Raises:
        FileNotFoundError: `name` looks like a file, and there is none.
        ValueError: A row has none of these columns, there is no row, or the file is not JSONL in UTF-8.
    """
    for option in (num_prompts, per_category):
        if option is not None and option < 1:
            raise UserValueError(f"At least one question has to be read, got {option}.")
    seen: Counter[str] = Counter()
    questions: list[Question] = []
    num_placeholders = 0
    for index, (where, row) in enumerate(_read_rows(name)):
        if len(questions) == num_prompts:
            break
        question = _read_question(row, index, f"{where} of {name!r}")
        if any(turn.startswith(_PLACEHOLDER) for turn in question.turns):
            num_placeholders += 1
            continue
        seen[question.category] += 1
        if per_category is None or seen[question.category] <= per_category:
            questions.append(question)
    if num_placeholders:
        logger.warning(
            f"Left out {num_placeholders} rows of {name!r}, which hold a placeholder instead of a text. SPEED-Bench's "
            f"own script fetches these texts: run it, and give the file that it writes."
        )
    if not questions:
        raise UserValueError(f"{name!r} holds no questions. A line is JSON, with `turns`, `prompt` or `text`.")
    return questions


def _read_rows(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the rows of a file or dataset, each with where it stands."""
    if name.endswith(".jsonl"):
        yield from ((f"Line {number}", row) for number, row in read_json_lines(name))
        return
    for index, row in enumerate(load_conversations(name, split=None)):
        try:
            yield f"Row {index}", parse_row(row)
        except MalformedRowError as error:
            raise UserValueError(f"Row {index} of {name!r} {error}. Each row must be a JSON object.") from error


def _read_question(row: Mapping[str, Any], index: int, where: str) -> Question:
    found = row.get("turns") or row.get("prompt") or row.get("text")
    if not found:
        raise UserValueError(f"{where} has the columns {sorted(row)}, and needs 'turns' or 'prompt' or 'text'.")
    turns = tuple(found) if isinstance(found, (list, tuple)) else (found,)
    if not all(isinstance(turn, str) and turn for turn in turns):
        raise UserValueError(f"{where} has turns that are not text: {turns!r}.")
    return Question(str(row.get("question_id", index)), str(row.get("category", "all")), turns)


def pad_left(
    prompts: Sequence[Sequence[int]], pad_token_id: int | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """
    Returns prompts as one batch, `input_ids` and `attention_mask` `(B, T)`. Without a padding token, token 0 pads: it
    is masked.
    """
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    seen = [torch.ones_like(row) for row in rows]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    return {"input_ids": pad(rows, padding_value=pad_token_id or 0), "attention_mask": pad(seen)}
