"""What a call passes of the package: the files with a function that it runs, and how many functions it calls."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import transformers_gumiho
from transformers_gumiho.generation.drafting.candidate_generator import GumihoCandidateGenerator
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


def count_calls(call: Callable[[], Any]) -> list[int]:
    """
    Returns how many functions of the package `call`, a generation, calls before its first cycle, and in each cycle.
    Comprehensions, generator expressions and lambdas are part of the function around them.
    """
    counts = [0]
    root, draft_tree = str(ROOT), GumihoCandidateGenerator.draft_tree.__code__

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(root):
            return
        if code is draft_tree:  # the first step of a cycle
            counts.append(0)
        if not code.co_name.startswith("<"):
            counts[-1] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts
