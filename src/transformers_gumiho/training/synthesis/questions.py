"""Prompts that the user has, next to those that a target writes."""

import json
from pathlib import Path

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
    questions: list[Prompt] = []
    # Not `splitlines`, which also splits at characters that stand in JSON strings (U+2028).
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if len(questions) == num_questions:
            break
        if line.strip():
            questions.append(_read(line, f"{path}:{number}"))
    if num_questions is not None and len(questions) < num_questions:
        raise ValueError(f"{str(path)!r} has {len(questions)} questions, and {num_questions} were asked for.")
    return questions


def _read(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        said = {message["role"]: message["content"] for message in reversed(messages)}
        if not isinstance(said["user"], str):
            raise TypeError("not text")
        return Prompt(said["user"], said.get("system"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{where} has no question. A line of this file is JSON with a `prompt`, or with `messages` and a user's "
            f"turn in them."
        ) from error
