"""Files that a stopped run can continue, wherever it stopped, and that only one run writes at a time."""

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .user_errors import UserOSError, UserValueError


try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


def check_begun_with(path: Path, settings: dict[str, Any]) -> None:
    """
    Writes the settings of a file next to it, or compares them with those that are there.

    Raises:
        ValueError: The file was begun with other settings, or the file of the settings is damaged.
        OSError: The disk is full. What was written before stays.
    """
    beside = settings_file(path)
    if path.exists() and path.stat().st_size and beside.exists():
        before = _read_settings(beside, path)
        if changed := sorted(name for name in settings if before.get(name) != settings[name]):
            raise UserValueError(
                f"{str(path)!r} was created with different settings: {', '.join(changed)}. Write into another file "
                f"or delete this one."
            )
        return
    # Written completely or not at all, because the settings are recorded nowhere else.
    unfinished = beside.with_name(beside.name + ".unfinished")
    with _file_named(beside):
        unfinished.write_text(json.dumps(settings, indent=2), encoding="utf-8")
        os.replace(unfinished, beside)


def settings_file(path: Path) -> Path:
    """Returns the path of the file with the settings of a file."""
    return path.with_name(path.name + ".settings.json")


def _read_settings(beside: Path, path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(beside.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserValueError(
            f"{str(beside)!r} is damaged. It holds the settings of {str(path)!r}. Delete it to continue with the "
            f"current settings; rows that were written with others stay."
        ) from error


def cut_unfinished_batch(path: Path, batch_size: int) -> int:
    """Cuts an unfinished batch off the file; returns the number of lines that are left in it."""
    lines = complete_lines(path)
    return cut_after(path, len(lines) - len(lines) % batch_size)


def complete_lines(path: Path) -> list[bytes]:
    """Returns the lines of a file, without an incomplete last one; none if there is no file."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def cut_after(path: Path, num_lines: int) -> int:
    """Cuts a file after its first `num_lines` lines, if it exists; returns `num_lines`."""
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        with path.open("rb+") as file:
            file.truncate(sum(map(len, lines[:num_lines])))
    return num_lines


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """
    Adds rows to the end of a file. They are written when this returns.

    Raises:
        OSError: The disk is full. What was written before stays.
    """
    with _file_named(path), path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """
    Locks a file or folder for this run, however the run ends. A missing file is created.

    Raises:
        OSError: Another run writes there.
    """
    if fcntl is None:  # Windows has no locks that end with the process without leaving a file
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserOSError(
                error.errno, "Another run is writing there. Wait for it to end, or write elsewhere", str(path)
            ) from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def way_out(error: Exception) -> str:
    """Returns what to do about an error in writing a file."""
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    # Libraries in other languages have the number only in the text.
    if is_full or any(f"os error {number})" in str(error) for number in (errno.ENOSPC, errno.EDQUOT)):
        return "Make room and run this again: it continues here"
    return "Remove the cause and run this again: it continues here"


@contextmanager
def _file_named(path: Path) -> Iterator[None]:
    """Adds the name of the file, and what to do, to an error in writing it."""
    try:
        yield
    except OSError as error:
        raise UserOSError(
            error.errno,
            f"Could not write {str(path)!r}: {error.strerror}. What was written before stays. {way_out(error)}",
        ) from error
