"""What a stopped run has measured, so that the next one continues with it."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..resumable_file import append_rows, check_begun_with, cut_after, settings_file, whole_lines
from .contest import Measurement


class Journal:
    """
    Measurements as JSONL, each on the disk as soon as it is taken.

    Args:
        path: The file.
        settings: What measurements depend on, in what JSON holds. They are kept beside the file.

    Raises:
        ValueError: The file was begun with other settings.
        OSError: The disk is full.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        check_begun_with(path, json.loads(json.dumps(settings)))  # as it is read again
        lines = whole_lines(path)
        cut_after(path, len(lines))
        rows = map(json.loads, lines)
        self._known = {json.dumps(row.pop("of"), sort_keys=True): Measurement(**row) for row in rows}

    def __len__(self) -> int:
        return len(self._known)

    def look_up_or(self, key: dict[str, Any], measure: Callable[[], Measurement]) -> Measurement:
        """Returns the measurement of this key; what is not there is measured and written."""
        name = json.dumps(key, sort_keys=True)
        if name not in self._known:
            taken = measure()
            append_rows(self.path, [{"of": key} | asdict(taken)])
            self._known[name] = taken
        return self._known[name]

    def delete(self) -> None:
        """Deletes the file, so that the next run measures anew."""
        self.path.unlink(missing_ok=True)
        settings_file(self.path).unlink(missing_ok=True)
