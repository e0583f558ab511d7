"""Where the time of a cycle goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..drafting import drafter as drafting
from ..drafting.candidate_generator import GumihoCandidateGenerator
from ..model.modeling_gumiho import GumihoModel
from ..target.runner import TargetRunner


@dataclass
class StageSeconds:
    """
    Seconds of a generation.

    Attributes:
        prompt: All that comes before the first cycle: preparing, reading the prompt, and drafting after it.
        verify: The target's passes over draft trees, with the masks and positions they need.
        draft: The drafter's passes and the output head over its features.
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
def stage_timer(device: torch.device, compiled: bool = False) -> Iterator[StageSeconds]:
    """
    Times the stages of the generation within it. It waits for the device at each of their ends, so the whole takes
    longer than without it; the shares are what it is for.

    Args:
        device: The target's.
        compiled: Whether the drafting of a cycle is one compiled function. Then it is timed as a whole, the growing of
            trees included.
    """
    seconds, is_inside, start = StageSeconds(), [False], time.perf_counter()

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_inside[0]:  # within another stage, which has its time
                return function(*args, **kwargs)
            is_inside[0] = True
            synchronize(device)
            begin = time.perf_counter()
            if stage == "verify":
                if seconds.num_cycles == 0:
                    seconds.prompt, seconds.draft = begin - start, 0.0
                seconds.num_cycles += 1
            try:
                return function(*args, **kwargs)
            finally:
                synchronize(device)
                is_inside[0] = False
                setattr(seconds, stage, getattr(seconds, stage) + time.perf_counter() - begin)

        return wrapper

    drafting_stages = (
        (GumihoModel, "fuse", "draft"),
        (GumihoModel, "run_serial_head", "draft"),
        (drafting, "run_batched_heads", "draft"),
        (drafting.GumihoDrafter, "score", "draft"),
    )
    whole_draft = ((GumihoCandidateGenerator, "get_tree", "draft"),)
    with ExitStack() as stack:
        for owner, name, stage in (
            (TargetRunner, "run_tree", "verify"),
            *(whole_draft if compiled else drafting_stages),
        ):
            replace_until_left(stack, owner, name, timed(stage, getattr(owner, name)))
        synchronize(device)
        start = time.perf_counter()
        yield seconds
        synchronize(device)
        seconds.total = time.perf_counter() - start
        if seconds.num_cycles == 0:
            seconds.prompt, seconds.draft = seconds.total, 0.0


def replace_until_left(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Puts `value` in the place of an attribute until the stack is left."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
