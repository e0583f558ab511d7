"""A file of rows: it grows as rows are written, in one or several processes, and continues where it was stopped."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from glob import escape
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from ...commands import UserValueError
from ..data.bars import progress_bar, write_lines
from ..data.manifest import Manifest, begin
from ..data.run_files import append_rows, complete_lines, cut_incomplete_line, sole_writer
from .local import LocalEngine
from .requests import Task
from .server import ServerEngine


Engine = LocalEngine | ServerEngine


def processes() -> PartialState:
    """Returns the state of this run's processes, of which the fastest may wait for a day."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=1))


@contextmanager
def row_file(path: str | Path, made_from: dict[str, Any]) -> Iterator["RowFile"]:
    """
    Opens a file of rows for this run alone. Raises `ValueError` where it was begun with other settings or is a folder,
    and `OSError` where another run writes there.
    """
    if Path(path).is_dir():
        raise UserValueError(f"{str(path)!r} is a folder. Name a file in it.")
    file, is_main = RowFile(Path(path).absolute()), processes().is_main_process
    with sole_writer(file.path) if is_main else nullcontext():
        if is_main:
            file.lines()  # a user's file is not touched
            begin(file.path, made_from)
        file.collect()
        yield file
        processes().wait_for_everyone()


class RowFile:
    """A JSONL file of rows with numbers."""

    def __init__(self, path: Path):
        self.path, self.state = path, processes()
        number = self.state.process_index
        self.part = path.with_name(f"{path.name}.part{number}") if number else path

    def lines(self) -> dict[int, bytes]:
        """Returns the lines of the file by the numbers of their rows; raises `ValueError` for something else."""
        try:
            found = {json.loads(line)["row"]: line for line in complete_lines(self.path)}
        except (ValueError, KeyError, TypeError) as error:
            raise UserValueError(
                f"{str(self.path)!r} holds a line that is damaged, or that this command did not write. Write into "
                f"another file, or repair this one."
            ) from error
        return {number: found[number] for number in sorted(found)}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of the file in their order: as Python's numbers, all tokens would not fit into memory."""
        yield from map(json.loads, self.lines().values())

    def write(self, numbers: Iterable[int], begin: Callable[[int], Task], engine: Engine, description: str) -> None:
        """
        Writes those rows, of these numbers, that are not there yet. Of several processes, each writes some, and the
        first one puts them together; behind a server, it writes alone.
        """
        there, state = self.lines(), self.state
        left = [number for number in numbers if number not in there]
        if engine.batch_size is not None:
            left = left[state.process_index :: state.num_processes]
        elif not state.is_main_process:
            left = []
        if there and isinstance(engine, ServerEngine):
            engine.has_answered = True  # an earlier start: what is left may be what it refuses
        with progress_bar(
            desc=description, total=len(left), unit="row", disable=not state.is_main_process
        ) as progress:
            for number, row in engine.run((number, begin(number)) for number in left):
                append_rows(self.part, [row | {"row": number}])
                progress.update()
        self.collect()

    def collect(self) -> None:
        """Adds what other processes wrote to the file."""
        self.state.wait_for_everyone()
        if self.state.is_main_process:
            cut_incomplete_line(self.path)
            for part in self.path.parent.glob(f"{escape(self.path.name)}.part*"):
                append_rows(self.path, map(json.loads, complete_lines(part)))
                part.unlink()
        self.state.wait_for_everyone()

    def finish(self, rows: Iterable[dict[str, Any]], report: str) -> None:
        """Replaces what is in the file by these rows, and prints a report."""
        if self.state.is_main_process:
            unfinished = self.path.with_name(self.path.name + ".unfinished")
            unfinished.unlink(missing_ok=True)
            append_rows(unfinished, rows)
            os.replace(unfinished, self.path)
            manifest = Manifest(self.path.parent, self.path.name)
            manifest.write(manifest.made_from, is_finished=True)
            write_lines(report)


def in_words(reasons: Iterable[str]) -> str:
    """Returns how often each reason was given."""
    return ", ".join(f"{count} ({reason})" for reason, count in Counter(reasons).most_common()) or "none"
