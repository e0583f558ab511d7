"""JSONL files that a run which was stopped at any byte goes on with."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def check_begun_with(path: Path, settings: dict[str, Any]) -> None:
    """Keeps the settings of a file next to it, and raises `ValueError` where it was begun with others."""
    beside = path.with_name(path.name + ".settings.json")
    if path.exists() and path.stat().st_size and beside.exists():
        before = json.loads(beside.read_text(encoding="utf-8"))
        if changed := sorted(name for name in settings if before.get(name) != settings[name]):
            raise ValueError(
                f"{str(path)!r} was begun with another {' and another '.join(changed)}. Write into another file, or "
                f"delete this one."
            )
    beside.write_text(json.dumps(settings, indent=2), encoding="utf-8")


def cut_unfinished_batch(path: Path, batch_size: int) -> int:
    """Cuts an unfinished batch off the file; returns the number of lines that are left in it."""
    lines = whole_lines(path)
    return cut_after(path, len(lines) - len(lines) % batch_size)


def whole_lines(path: Path) -> list[bytes]:
    """Returns the lines of a file, without a last one that is not whole; none where there is no file."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def cut_after(path: Path, num_lines: int) -> int:
    """Keeps the first `num_lines` of a file, where there is one; returns `num_lines`."""
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        with path.open("rb+") as file:
            file.truncate(sum(map(len, lines[:num_lines])))
    return num_lines


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """
    Adds rows to the end of a file, and sees them on the disk.

    Raises:
        OSError: The disk is full. What was written before stays.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    except OSError as error:
        raise OSError(
            error.errno,
            f"Could not write {str(path)!r}: {error.strerror}. What was written before stays. Make room and run this "
            f"again: it goes on here",
        ) from error
