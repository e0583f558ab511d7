"""Prompts that the user has, next to those that a target writes."""

from pathlib import Path
from typing import Any

from ...text_files import read_json_lines
from .prompts import Prompt


def read_questions(path: str | Path, num_questions: int | None = None) -> list[Prompt]:
    """
    Reads the first questions of a JSONL file.

    Args:
        path: Rows of a `prompt`, or of `messages` of which the first user turn is taken.
        num_questions: How many, at most. By default, all.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A row has no question, or there are fewer than `num_questions`.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r} to read questions from.")
    questions = [_read(row, f"{path}:{number}") for number, row in read_json_lines(path, num_questions)]
    if num_questions is not None and len(questions) < num_questions:
        raise ValueError(f"{str(path)!r} has {len(questions)} questions, and {num_questions} were asked for.")
    return questions


def _read(row: dict[str, Any], where: str) -> Prompt:
    try:
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        said = {message["role"]: message["content"] for message in reversed(messages)}
        if not isinstance(said["user"], str):
            raise TypeError("not text")
        return Prompt(said["user"], said.get("system"))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{where} has no question. A line of this file is JSON with a `prompt`, or with `messages` and a user's "
            f"turn in them."
        ) from error
