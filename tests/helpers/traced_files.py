"""The files of the package that a call passes: those with a function that it runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import transformers_gumiho
from transformers_gumiho.generation.observers import GenerationObserver, Stage, observing


ROOT = Path(transformers_gumiho.__file__).parent


class _Cycles(GenerationObserver):
    """Counts the cycles that have begun."""

    def __init__(self) -> None:
        self.num_begun = 0

    def on_stage_begin(self, stage: Stage) -> None:
        self.num_begun += stage == "draft"


def traced_files(call: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Returns the files that `call`, a generation, passes, and those of its second cycle, both in order."""
    files: dict[str, None] = {}
    of_cycle: dict[str, None] = {}
    cycles = _Cycles()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        # The loop began before its cycles: it is the caller of what they run.
        for running in filter(None, (frame.f_back, frame)):
            path = Path(running.f_code.co_filename)
            if path.is_relative_to(ROOT):
                name = path.relative_to(ROOT).as_posix()
                files.setdefault(name)
                if cycles.num_begun == 2:
                    of_cycle.setdefault(name)

    with observing(cycles):
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    return list(files), list(of_cycle)
