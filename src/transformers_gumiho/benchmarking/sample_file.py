"""What a benchmark has measured, in a file that a later run goes on with."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .sample import Sample


class SampleFile:
    """
    The samples of a benchmark as JSONL, each written as soon as it is measured.

    Args:
        path: The file.
        settings: What the samples depend on, besides the questions. It is kept beside the file.
        resume: Keep what the file holds instead of beginning anew.

    Raises:
        ValueError: What the file holds was measured with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], resume: bool = False):
        self.path = path
        self._known: dict[tuple, Sample] = {}
        self._num_turns = 0
        settings_file = path.with_suffix(".settings.json")
        if resume and path.exists():
            _check_settings(settings_file, settings)
            self._read()
        else:
            path.write_text("", encoding="utf-8")
            settings_file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def find(
        self, modes: Iterable[str], temperature: float, batch_size: int, questions: Sequence[str], turn: int
    ) -> list[Sample] | None:
        """Returns the samples of a turn in these modes, `None` where one of them is missing."""
        found = [self._known.get((mode, temperature, batch_size, tuple(questions), turn)) for mode in modes]
        return [sample for sample in found if sample is not None] if None not in found else None

    def append(self, samples: Sequence[Sample]) -> None:
        """Writes the samples of a turn."""
        lines = [json.dumps({"batch": self._num_turns} | asdict(sample)) + "\n" for sample in samples]
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
        self._num_turns += 1

    def _read(self) -> None:
        content = self.path.read_bytes()
        # A run that was killed may have left half a line.
        content = content[: content.rfind(b"\n") + 1]
        self.path.write_bytes(content)
        for line in content.decode().splitlines():
            fields = json.loads(line)
            self._num_turns = max(self._num_turns, fields.pop("batch") + 1)
            sample = Sample(**fields)
            key = (sample.mode, sample.temperature, sample.batch_size, tuple(sample.questions), sample.turn)
            self._known[key] = sample


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    if not path.exists():
        raise ValueError(f"{path} is missing, so nobody can tell what the samples beside it are of. Begin anew.")
    # As they look when they are read.
    settings, known = json.loads(json.dumps(settings)), json.loads(path.read_text(encoding="utf-8"))
    differing = [name for name in settings | known if settings.get(name) != known.get(name)]
    if differing:
        found = ", ".join(f"{name} {known.get(name)!r} instead of {settings.get(name)!r}" for name in differing)
        raise ValueError(
            f"The samples in {path.parent} were measured with {found}: they cannot be gone on with. Give another "
            "--output_dir, or leave out --resume to measure anew."
        )
