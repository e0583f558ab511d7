"""Prompts: questions of one or several turns, in categories."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.utils import logging

from ...commands import UserValueError
from ...files import read_text
from ...training.data.datasets import JSON_LINE, MalformedRowError, load_conversations, parse_row, read_pair


logger = logging.get_logger(__name__)

# The published files of SPEED-Bench hold this in place of texts that it may not distribute.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class Question:
    """What a user says in the `turns` of a conversation, with its `name` and `category`."""

    name: str
    category: str
    turns: tuple[str, ...]


def read_prompts(name: str, *, num_prompts: int | None = None, per_category: int | None = None) -> list[Question]:
    """
    Reads up to `num_prompts` questions, `per_category` of each category, from the file or dataset of this `name`, to
    which `:` and a config may be added. All but JSONL need `datasets`. A row has `turns`, `prompt`, `instruction` (and
    `input`), `question` or `text`, and maybe `category` and `question_id`.

    Raises:
        ValueError: A row has none of these columns, there is no row, or the file is not JSONL in UTF-8.
    """
    seen: Counter[str] = Counter()
    questions: list[Question] = []
    num_placeholders = 0
    for question in _read_questions(name):
        if len(questions) == num_prompts:
            break
        if any(turn.startswith(_PLACEHOLDER) for turn in question.turns):
            num_placeholders += 1
            continue
        seen[question.category] += 1
        if per_category is None or seen[question.category] <= per_category:
            questions.append(question)
    if num_placeholders:
        logger.warning(
            f"Left out {num_placeholders} rows of {name!r}, which hold a placeholder instead of a text. Run "
            f"SPEED-Bench's own script, and give the file that it writes."
        )
    if not questions:
        raise UserValueError(f"{name!r} holds no questions. A line is JSON, with `turns`, `prompt` or `text`.")
    return questions


def _read_questions(name: str) -> Iterator[Question]:
    rows: Iterable[Mapping[str, Any]]
    if name.endswith(".jsonl"):  # without `datasets`; `splitlines` would split at U+2028, which JSON may hold
        rows = [{JSON_LINE: line} for line in read_text(name).split("\n")]
    else:
        rows = load_conversations(name, split=None)
    for index, row in enumerate(rows):
        if JSON_LINE not in row or row[JSON_LINE].strip():
            yield _read_question(row, index, f"Row {index + 1} of {name!r}")


def _read_question(row: Mapping[str, Any], index: int, where: str) -> Question:
    try:
        row = parse_row(row)
    except MalformedRowError as error:
        raise UserValueError(f'{where} {error}. Give a JSON object, such as {{"prompt": "..."}}.') from error
    found = row.get("turns") or read_pair(row)[0] or row.get("text")
    if not found:
        raise UserValueError(f"{where} has the columns {sorted(row)}, and needs 'turns' or 'prompt' or 'text'.")
    turns = tuple(found) if isinstance(found, (list, tuple)) else (found,)
    if not all(isinstance(turn, str) and turn for turn in turns):
        raise UserValueError(f"{where} has turns that are not text: {turns!r}.")
    return Question(str(row.get("question_id", index)), str(row.get("category", "all")), turns)
