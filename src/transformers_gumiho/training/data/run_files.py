"""Files that a stopped run can continue: what they were made from, their complete lines, and who writes them."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ...commands import UserOSError, UserValueError, says_full


try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

# Ends the name of the file with what another one was made from.
SETTINGS = ".settings.json"


# What differs from what records say, where that is allowed.
_differences: ContextVar[list[str] | None] = ContextVar("differences", default=None)
_FORCED = "forced.json"


@contextmanager
def differences_kept(folder: Path, is_writer: bool) -> Iterator[None]:
    """Within this, values that differ from recorded ones are no error, and a file in the folder lists them."""
    found = forced_differences(folder)
    token = _differences.set(found)
    try:
        yield
    finally:
        _differences.reset(token)
        if found and is_writer:
            (folder / _FORCED).write_text(json.dumps(found, indent=2), encoding="utf-8")


def forced_differences(folder: Path) -> list[str]:
    """Returns what differed in a run that was continued all the same."""
    found, path = _differences.get(), folder / _FORCED
    if found is not None:
        return found
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


class Record:
    """
    What a result was made from, in a JSON file next to it, and whether it is finished.

    Args:
        path: The file.

    Attributes:
        made_from: The values by name; empty where nothing is recorded yet.
        is_finished: Whether the result is complete.

    Raises:
        ValueError: The file is damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        self.made_from: dict[str, Any] = {}
        self.is_finished = False
        if not path.exists():
            return
        try:
            found = dict(json.loads(path.read_text(encoding="utf-8")))
            self.made_from, self.is_finished = dict(found["made_from"]), bool(found["is_finished"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserValueError(
                f"{str(path)!r} is damaged. It says what the files next to it were made from. Delete it to continue "
                f"with the current settings; what was made with others stays."
            ) from error

    def check(self, made_from: dict[str, Any], way_out: str) -> None:
        """Raises `ValueError` for values that differ from the recorded ones. A name that the record lacks is new."""
        before, now = self.made_from, json.loads(json.dumps(made_from))  # as it is read again
        changed = [
            f"{name} ({before[name]}, now {now[name]})"
            for name in sorted(now)
            if name in before and before[name] != now[name]
        ]
        if changed and (noted := _differences.get()) is not None:
            noted += [difference for difference in changed if difference not in noted]
        elif changed:
            name = str(self.path).removesuffix(SETTINGS)
            raise UserValueError(f"{name!r} was created with different settings: {', '.join(changed)}. {way_out}")

    def write(self, made_from: dict[str, Any], is_finished: bool = False) -> None:
        """
        Writes the file completely or not at all.

        Raises:
            OSError: The disk is full.
        """
        self.made_from, self.is_finished = made_from, is_finished
        unfinished = self.path.with_name(self.path.name + ".unfinished")
        with _file_named(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"made_from": made_from, "is_finished": is_finished}, indent=2)
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, self.path)


def ask_before_deleting(what: str, can_ask: bool = True) -> None:
    """Asks whether to delete what a sentence names; raises `ValueError` if not, or without a terminal to ask in."""
    if not can_ask or not sys.stdin.isatty():
        raise UserValueError(f"{what}. Give --yes to delete them, or leave --restart out to continue.")
    if input(f"{what}. Delete them? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserValueError("Nothing was deleted. Leave --restart out to continue.")


def check_begun_with(
    path: Path, settings: dict[str, Any], instead: str = "Write into another file or delete this one."
) -> None:
    """
    Writes the settings of a file next to it, or compares them with those that are there. `instead` is what to do
    where they differ.

    Raises:
        ValueError: The file was begun with other settings, or the file of the settings is damaged.
        OSError: The disk is full. What was written before stays.
    """
    has_rows = path.exists() and path.stat().st_size > 0
    if has_rows and settings_file(path).exists():
        Record(settings_file(path)).check(settings, instead)
    else:
        settings_file(path).unlink(missing_ok=True)
        Record(settings_file(path)).write(settings)


def settings_file(path: Path) -> Path:
    """Returns the path of the file with the settings of a file."""
    return path.with_name(path.name + SETTINGS)


def complete_lines(path: Path) -> list[bytes]:
    """Returns the lines of a file, without an incomplete last one; none if there is no file."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def cut_incomplete_line(path: Path) -> None:
    """Cuts an incomplete last line off a file, if it exists."""
    if path.exists():
        os.truncate(path, sum(map(len, complete_lines(path))))


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
    return f"{'Make room' if says_full(error) else 'Remove the cause'} and run this again: it continues here"


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
