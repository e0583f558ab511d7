"""Files that a stopped run can continue: their complete lines, and who writes them."""

import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ...commands import UserOSError, UserValueError, says_full


try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


def ask_before_deleting(what: str, can_ask: bool = True) -> None:
    """Asks whether to delete what a sentence names; raises `ValueError` if not, or without a terminal to ask in."""
    if not can_ask or not sys.stdin.isatty():
        raise UserValueError(f"{what}. Give --yes to delete them, or leave --restart out to continue.")
    if input(f"{what}. Delete them? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserValueError("Nothing was deleted. Leave --restart out to continue.")


def complete_lines(path: Path) -> list[bytes]:
    """Returns the lines of a file, without an incomplete last one; none if there is no file."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def cut_incomplete_line(path: Path) -> None:
    """Cuts an incomplete last line off a file, if it exists."""
    if path.exists():
        os.truncate(path, sum(map(len, complete_lines(path))))


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Adds rows to the end of a file; raises `OSError` where the disk is full, and what was there stays."""
    with os_errors_named(path), path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Locks a file or folder, which is created, for this run; raises `OSError` where another run writes there."""
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


@contextmanager
def os_errors_named(path: Path) -> Iterator[None]:
    """Adds the name of the file, and what to do, to an error in writing it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        todo = "Make room" if says_full(error) else "Remove the cause"
        said = getattr(error, "strerror", None) or error
        raise UserOSError(
            getattr(error, "errno", None) or errno.EIO,
            f"Could not write {str(path)!r}: {said}. What was written before stays. {todo} and run this again: it "
            f"continues here",
        ) from error
