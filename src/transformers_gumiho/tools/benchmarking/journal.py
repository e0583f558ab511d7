"""A file of measurements, from which a stopped benchmark continues, and the conditions of these measurements."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from ...commands import UserValueError
from ...files import append_rows, check_begun_with, complete_lines, cut_after, settings_file
from ...generation.verification.placement import input_device
from ...model.fingerprint import model_fingerprint
from ...model.modeling_gumiho import GumihoModel
from ..measuring.machine import machine_name
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
        rows = list(map(json.loads, complete_lines(path)))
        if any("samples" not in row for row in rows):
            raise UserValueError(f"{str(path)!r} was written by an older version. Run without --resume.")
        cut_after(path, len(rows))
        self.known = {row["of"]: [Sample(**sample) for sample in row["samples"]] for row in rows}

    def append(self, key: str, samples: Sequence[Sample]) -> None:
        """Writes the samples of a batch. Raises `OSError` if the disk is full; what was written before stays."""
        append_rows(self._path, [{"of": key, "samples": list(map(asdict, samples))}])


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
