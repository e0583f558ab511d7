"""Where the time of a cycle goes."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..decoding.observers import GenerationObserver, Stage, observing


@dataclass
class StageSeconds:
    """
    Seconds of a generation.

    Attributes:
        prompt: All that comes before the first cycle: preparing, reading the prompt, and drafting after it.
        verify: The target's passes over draft trees, with the masks and positions they need.
        draft: The drafter's passes and the output head over its features. Where the drafting of a cycle is one
            compiled function, all of it, the growing of trees included.
        total: All of it. What is left is the package's own: growing trees, walking them, keeping caches and texts.
        num_cycles: Passes over trees.
    """

    prompt: float = 0.0
    verify: float = 0.0
    draft: float = 0.0
    total: float = 0.0
    num_cycles: int = 0

    @property
    def rest(self) -> float:
        """Seconds outside of any model's arithmetic."""
        return self.total - self.prompt - self.verify - self.draft

    @property
    def outside(self) -> float:
        """Seconds of the cycles outside of the target's passes."""
        return self.draft + self.rest


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def stage_timer(device: torch.device) -> Iterator[StageSeconds]:
    """
    Times the stages of this thread's generation within it. It waits for the device at each of their ends, so the whole
    takes longer than without it; the shares are what it is for.

    Args:
        device: The target's.
    """
    seconds = StageSeconds()
    synchronize(device)
    timer = _StageTimer(device)
    with observing(timer):
        yield seconds
    synchronize(device)
    seconds.total = time.perf_counter() - timer.start
    seconds.num_cycles = timer.num_cycles
    seconds.prompt = timer.prompt if timer.num_cycles else seconds.total
    seconds.verify = timer.seconds["verify"]
    # Compiled, the drafting of a cycle is one function, and nobody is told of the passes in it.
    seconds.draft = timer.seconds["drafter_pass"] or timer.seconds["draft"]


class _StageTimer(GenerationObserver):
    """
    Adds up the seconds of each stage from the first pass over a tree on.

    Args:
        device: Waited for at the beginning and the end of each stage.

    Attributes:
        start: When it was made, in the seconds of `time.perf_counter`.
        prompt: Seconds from then to the first pass over a tree.
        num_cycles: Passes over trees.
        seconds: Of each stage since the first of them.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.prompt = 0.0
        self.num_cycles = 0
        self.seconds = defaultdict[Stage, float](float)
        self._begins: list[float] = []  # of the stages that last
        self.start = time.perf_counter()

    def on_stage_begin(self, stage: Stage) -> None:
        begin = self._now()
        if stage == "verify":
            if self.num_cycles == 0:
                self.prompt = begin - self.start
                self.seconds.clear()
            self.num_cycles += 1
        self._begins.append(begin)

    def on_stage_end(self, stage: Stage) -> None:
        self.seconds[stage] += self._now() - self._begins.pop()

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()
