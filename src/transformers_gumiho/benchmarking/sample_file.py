"""What a benchmark has measured, in a file that a later run goes on with."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from ..measuring.prompts import Question
from ..resumable_file import append_rows, check_begun_with, cut_after, whole_lines
from .sample import Sample


class SampleFile:
    """
    The samples of a benchmark as JSONL, each written as soon as it is measured.

    Args:
        path: The file.
        settings: What the samples depend on, besides the questions. They are kept beside the file.
        resume: Keep what the file holds instead of beginning anew.

    Raises:
        ValueError: What the file holds was measured with other settings.
        OSError: The disk is full.
    """

    def __init__(self, path: Path, settings: dict[str, Any], resume: bool = False):
        self.path = path
        self._known: dict[str, list[list[Sample]]] = {}
        if not resume:
            path.unlink(missing_ok=True)
        check_begun_with(path, json.loads(json.dumps(settings)))
        self._read()

    def find(self, key: str) -> list[list[Sample]]:
        """
        Returns the samples of each turn of a conversation, none unless all are there: turns need answers.

        Args:
            key: The conversation's; see [`conversation_key`].
        """
        return self._known.get(key, [])

    def append(self, key: str, samples: Sequence[Sample], num_samples: int) -> None:
        """
        Writes the samples of a turn.

        Args:
            key: The conversation's.
            samples: What was measured.
            num_samples: Of all turns of the conversation.

        Raises:
            OSError: The disk is full. What was written before stays.
        """
        append_rows(self.path, ({"conversation": key, "of": num_samples} | asdict(sample) for sample in samples))

    def _read(self) -> None:
        rows = [json.loads(line) for line in whole_lines(self.path)]
        num_kept = 0
        for key, group in groupby(rows, key=lambda row: row["conversation"]):
            of_conversation = list(group)
            if len(of_conversation) < of_conversation[0]["of"]:
                break  # the run was stopped in it
            num_kept += len(of_conversation)
            turns = defaultdict(list)
            for row in of_conversation:
                sample = Sample(**{name: value for name, value in row.items() if name not in ("conversation", "of")})
                turns[sample.turn].append(sample)
            self._known[key] = list(turns.values())
        cut_after(self.path, num_kept)


def conversation_key(temperature: float, batch_size: int, questions: Sequence[Question]) -> str:
    """Returns what stands for questions that are asked together in a way of decoding."""
    asked = [(question.category, question.name, question.turns) for question in questions]
    return hashlib.sha256(json.dumps([temperature, batch_size, asked]).encode()).hexdigest()[:16]
