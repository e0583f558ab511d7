"""Where the time of a cycle goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .. import drafting
from ..candidate_generator import GumihoCandidateGenerator
from ..modeling_gumiho import GumihoModel
from ..target import TargetRunner


@dataclass
class StageSeconds:
    """
    Seconds of one or several generations.

    Attributes:
        prompt: Reading the prompt, and drafting the first tree after it.
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
def stage_timer(device: torch.device) -> Iterator[StageSeconds]:
    """
    Times the stages of the generations within it. It waits for the device at each of their ends, so the whole takes
    longer than without it; the shares are what it is for.
    """
    seconds, depth = StageSeconds(), [0]

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if depth[0]:  # within another stage, which has its time
                return function(*args, **kwargs)
            depth[0] += 1
            synchronize(device)
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                synchronize(device)
                depth[0] -= 1
                setattr(seconds, stage, getattr(seconds, stage) + time.perf_counter() - begin)
                seconds.num_cycles += stage == "verify"

        return wrapper

    draft = GumihoCandidateGenerator.get_tree

    def get_tree(self: GumihoCandidateGenerator, *args: Any, **kwargs: Any) -> Any:
        if seconds.num_cycles == 0:
            return timed("prompt", draft)(self, *args, **kwargs)
        head = self.drafter.lm_head
        self.drafter.lm_head = timed("draft", head)
        try:
            return draft(self, *args, **kwargs)
        finally:
            self.drafter.lm_head = head

    stages = (
        (TargetRunner, "read_prompt", "prompt"),
        (TargetRunner, "run_tree", "verify"),
        (GumihoModel, "fuse", "draft"),
        (GumihoModel, "run_serial_head", "draft"),
        (drafting, "run_batched_heads", "draft"),
    )
    with ExitStack() as stack:
        for owner, name, stage in stages:
            replace_until_left(stack, owner, name, timed(stage, getattr(owner, name)))
        replace_until_left(stack, GumihoCandidateGenerator, "get_tree", get_tree)
        synchronize(device)
        begin = time.perf_counter()
        yield seconds
        synchronize(device)
        seconds.total += time.perf_counter() - begin


def replace_until_left(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Puts `value` in the place of an attribute until the stack is left."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
