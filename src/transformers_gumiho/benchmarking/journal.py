"""A file of measurements, from which a stopped benchmark continues, and the conditions of these measurements."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from ..measuring.machine import machine_name
from ..model.modeling_gumiho import GumihoModel
from ..resumable_file import append_rows, check_begun_with, complete_lines, cut_after, settings_file
from ..verification.fingerprint import model_fingerprint
from ..verification.placement import input_device


class Journal:
    """
    Measurements as JSONL, written to the disk as soon as they are taken. The rows with the same key are a group. A
    group counts once it is complete.

    Args:
        path: The file.
        settings: The conditions of the measurements, as values for JSON. They are kept next to the file.
        resume: Continue the file instead of beginning a new one.

    Raises:
        ValueError: The file was begun with other settings.
        OSError: The disk is full.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool = True):
        self.path = path
        self._known: dict[str, list[dict[str, Any]]] = {}
        if not resume:
            path.unlink(missing_ok=True)
            settings_file(path).unlink(missing_ok=True)
        check_begun_with(path, json.loads(json.dumps(settings)))  # as it is read again
        num_kept = 0
        for key, group in groupby(map(json.loads, complete_lines(path)), key=lambda row: row["of"]):
            rows = list(group)
            if len(rows) < rows[0]["num_rows"]:
                break  # the run was stopped in it
            num_kept += len(rows)
            self._known[key] = [{name: row[name] for name in row if name not in ("of", "num_rows")} for row in rows]
        cut_after(path, num_kept)

    def find(self, key: str) -> list[dict[str, Any]]:
        """Returns the rows of a complete group, or no rows."""
        return self._known.get(key, [])

    def append(self, key: str, rows: Sequence[dict[str, Any]], num_rows: int) -> None:
        """
        Writes rows of a group, which is complete once it has `num_rows`.

        Raises:
            OSError: The disk is full. What was written before stays.
        """
        append_rows(self.path, ({"of": key, "num_rows": num_rows} | row for row in rows))
        if len(rows) == num_rows:
            self._known[key] = list(rows)


def measuring_conditions(target: PreTrainedModel, drafter: GumihoModel) -> dict[str, Any]:
    """Returns the conditions that a run must share with a run that it continues, as values for JSON."""
    return {
        "machine": machine_name(input_device(target)),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "target": model_fingerprint(target),
        "assistant": model_fingerprint(drafter),
        "settings of the assistant": drafter.generation_config.to_diff_dict(),
    }
