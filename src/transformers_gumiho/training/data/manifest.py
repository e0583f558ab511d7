"""What an artefact was made from: its manifest, `made_from.json` in a folder or beside a file."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ...commands import UserValueError
from .run_files import os_errors_named


MADE_FROM = "made_from.json"
# Within `--force`: whether this process notes what differs, or the others, which read.
_allowed: ContextVar[str | None] = ContextVar("allowed", default=None)


class Manifest:
    """
    The manifest of a folder, or of a `file` in it: what it is `made_from`, empty where nothing is written yet, whether
    it `is_finished`, and what differed where it was continued all the same (`forced`). Raises `ValueError` where it is
    damaged.
    """

    def __init__(self, folder: str | Path, file: str = ""):
        self.artefact = Path(folder) / file
        self.path = Path(folder) / (f"{file}.{MADE_FROM}" if file else MADE_FROM)
        self.made_from: dict[str, Any] = {}
        self.is_finished, self.forced = False, list[str]()
        if not self.path.exists():
            return
        try:
            found = dict(json.loads(self.path.read_text(encoding="utf-8")))
            self.made_from, self.is_finished = dict(found["made_from"]), bool(found["is_finished"])
            self.forced = list(found.get("forced", []))
        except (ValueError, TypeError, KeyError) as error:
            raise UserValueError(
                f"{str(self.path)!r} is damaged. It says what {str(self.artefact)!r} was made from. Delete it to "
                f"continue with the current settings; what was made with others stays."
            ) from error

    def check(self, made_from: dict[str, Any], way_out: str) -> None:
        """
        Raises `ValueError` for values that differ from those before; where that is allowed, notes and takes them. A
        name that the manifest lacks is new.
        """
        before, now = self.made_from, json.loads(json.dumps(made_from))  # as it is read again
        changed = [name for name in sorted(now) if name in before and before[name] != now[name]]
        if not changed:
            return
        described = [f"{name} ({before[name]}, now {now[name]})" for name in changed]
        if _allowed.get() is None:
            raise UserValueError(
                f"{str(self.artefact)!r} was created with different settings: {', '.join(described)}. {way_out}"
            )
        self.forced += described
        self.made_from = before | {name: now[name] for name in changed}
        if _allowed.get() == "noted":
            self.write(self.made_from, self.is_finished)

    def write(self, made_from: dict[str, Any], is_finished: bool = False) -> None:
        """Writes the file completely or not at all; raises `OSError` where the disk is full."""
        self.made_from, self.is_finished = made_from, is_finished
        found = {"made_from": made_from, "is_finished": is_finished}
        if self.forced:
            found["forced"] = self.forced
        unfinished = self.path.with_name(self.path.name + ".unfinished")
        with os_errors_named(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(found, indent=2), encoding="utf-8")
            os.replace(unfinished, self.path)


@contextmanager
def differences_allowed(is_writer: bool) -> Iterator[None]:
    """Within this, values that differ from those of a manifest are no error. The writer notes them in it."""
    token = _allowed.set("noted" if is_writer else "read")
    try:
        yield
    finally:
        _allowed.reset(token)


def forced_differences(folder: Path) -> list[str]:
    """Returns what differed in artefacts of a folder that were continued all the same."""
    paths = [*folder.glob(f"*{MADE_FROM}"), *folder.glob(f"*/{MADE_FROM}")]
    found = (Manifest(path.parent, path.name[: -len(MADE_FROM) - 1]).forced for path in sorted(paths))
    return list(dict.fromkeys(difference for forced in found for difference in forced))


def begin(path: Path, made_from: dict[str, Any], instead: str = "Write into another file or delete this one.") -> None:
    """
    Writes the manifest of a file of rows, or compares with the one it has, and says what to do `instead` where they
    differ (`ValueError`).
    """
    has_rows = path.exists() and path.stat().st_size > 0
    if not has_rows:
        path.with_name(f"{path.name}.{MADE_FROM}").unlink(missing_ok=True)
    manifest = Manifest(path.parent, path.name)
    manifest.check(made_from, instead)
    if not manifest.made_from:
        manifest.write(made_from)
