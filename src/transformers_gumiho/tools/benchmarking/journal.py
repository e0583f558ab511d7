"""A file of measurements, from which a stopped benchmark continues."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...files import append_rows, check_begun_with, complete_lines, cut_incomplete_line, settings_file
from .summary import Sample


class Journal:
    """
    A JSONL file with a line for each batch of conversations, written as soon as all its turns are measured.

    Args:
        path: The file.
        settings: The conditions of the measurements, as values for JSON. They are kept next to the file.
        resume: Continue the file instead of beginning a new one.

    Attributes:
        known: The samples that the file holds, by the key of their batch.

    Raises:
        ValueError: The file was begun with other settings.
        OSError: The disk is full.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool):
        self._path = path
        if not resume:
            path.unlink(missing_ok=True)
            settings_file(path).unlink(missing_ok=True)
        check_begun_with(path, dict(settings))
        cut_incomplete_line(path)
        rows = map(json.loads, complete_lines(path))
        self.known = {row["of"]: [Sample(**sample) for sample in row["samples"]] for row in rows}

    def append(self, key: str, samples: Sequence[Sample]) -> None:
        """Writes the samples of a batch. Raises `OSError` if the disk is full; what was written before stays."""
        append_rows(self._path, [{"of": key, "samples": list(map(asdict, samples))}])
