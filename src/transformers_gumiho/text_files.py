"""Reading text files of users: errors name the file and the line."""

import json
from pathlib import Path
from typing import Any

from .user_errors import UserValueError, as_user_errors


def read_text(path: str | Path) -> str:
    """
    Returns the text of a UTF-8 file, without a byte order mark.

    Raises:
        OSError: There is no such file.
        ValueError: The file has another encoding.
    """
    with as_user_errors():
        data = Path(path).read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserValueError(
            f"{str(path)!r} is not UTF-8 in line {line}: {error.reason}. Save it as UTF-8."
        ) from error


def read_json_lines(path: str | Path, num_rows: int | None = None) -> list[tuple[int, dict[str, Any]]]:
    """
    Returns the first rows of a JSONL file, each with the number of its line. Blank lines are skipped.

    Raises:
        ValueError: A line is not a JSON object, or the file is not UTF-8.
    """
    rows: list[tuple[int, dict[str, Any]]] = []
    # Not `splitlines`, which also splits at characters that JSON strings may hold (U+2028).
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if num_rows is not None and len(rows) == num_rows:
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserValueError(f"{str(path)!r} is not JSON in line {number}: {error}. Correct the line.") from error
        if not isinstance(row, dict):
            raise UserValueError(
                f"{str(path)!r} holds a {type(row).__name__} in line {number}. Each line must be a JSON object, "
                f'such as {{"prompt": "..."}}.'
            )
        rows.append((number, row))
    return rows
