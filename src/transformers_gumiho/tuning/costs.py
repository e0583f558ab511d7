"""What a cycle costs on this machine."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..benchmarking.modes import decoding_settings
from ..benchmarking.stages import stage_timer, synchronize
from ..modeling_gumiho import GumihoModel


Shape = tuple[int, int]


@dataclass(frozen=True)
class CycleCosts:
    """
    Measured seconds, and between the measured sizes what lies between.

    Attributes:
        verify: For each number of drafted tokens, the seconds of the target's pass over the tree.
        rest: For each branching factor and tree depth, the seconds of all else in a cycle (drafting and keeping the
            books) for each number of drafted tokens.
        plain: Seconds of a step of plain decoding.
    """

    verify: dict[int, float]
    rest: dict[Shape, dict[int, float]]
    plain: float

    def verify_seconds(self, num_assistant_tokens: int) -> float:
        """Returns what verifying so many drafted tokens costs."""
        return _interpolate(num_assistant_tokens, self.verify)

    def cycle_seconds(self, num_assistant_tokens: int, branching_factor: int, tree_depth: int) -> float:
        """Returns what a cycle costs; the branching factor must be one that was measured."""
        at_depths = {
            depth: _interpolate(num_assistant_tokens, seconds)
            for (factor, depth), seconds in self.rest.items()
            if factor == branching_factor
        }
        return self.verify_seconds(num_assistant_tokens) + _interpolate(tree_depth, at_depths)


def tree_capacity(branching_factor: int, tree_depth: int, num_serial_tokens: int) -> float:
    """Returns how many tokens a tree of this shape can hold, at most."""
    if branching_factor == 1:
        return tree_depth
    if tree_depth > num_serial_tokens:
        return math.inf
    # Each serial step extends the best `branching_factor` nodes of the one before.
    return branching_factor + (tree_depth - 1) * branching_factor**2


@torch.inference_mode()
def measure_costs(
    target: PreTrainedModel,
    drafter: GumihoModel,
    prompt: torch.Tensor,
    sizes: Sequence[int],
    branching_factors: Sequence[int],
    max_new_tokens: int,
    repeats: int = 3,
) -> CycleCosts:
    """
    Times cycles of every shape after `prompt` `(T,)`, in turns, so that a machine that drifts hurts all shapes alike.

    Args:
        target: The target.
        drafter: The drafter. Its settings are as before afterwards.
        prompt: Token ids.
        sizes: Drafted tokens of the trees, increasing.
        branching_factors: Tokens kept at a serial step.
        max_new_tokens: Tokens of each run; its cycles are averaged.
        repeats: Runs of each shape, of which the median counts.
    """
    num_serial_tokens, deepest = drafter.config.num_serial_tokens, drafter.config.max_draft_depth
    depths = sorted({1, num_serial_tokens, deepest})
    trees = [
        (factor, depth, size)
        for factor in branching_factors
        for depth in depths
        for size in sizes
        if size <= tree_capacity(factor, depth, num_serial_tokens)
    ]
    timed: dict[tuple[int, int, int], list[tuple[float, float]]] = {tree: [] for tree in trees}
    plain = []
    ids = prompt[None].to(target.device)
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens}
    for repeat in range(repeats + 1):  # the first one warms up
        plain.append(_plain_step(target, ids, settings))
        for tree in tqdm(trees, desc=f"timing cycles, {repeat} of {repeats}", unit="shape", leave=False):
            shape = dict(zip(("branching_factor", "tree_depth", "num_assistant_tokens"), tree, strict=True))
            with decoding_settings(drafter, shape), stage_timer(target.device) as seconds:
                target.generate(ids, assistant_model=drafter, **settings)
            # What comes before the first cycle belongs to no cycle.
            timed[tree].append((seconds.verify / seconds.num_cycles, seconds.outside / seconds.num_cycles))
    verify, rest = (
        {tree: statistics.median(v[i] for v in times[1:]) for tree, times in timed.items()} for i in (0, 1)
    )
    return CycleCosts(
        # The target's pass does not know how its tree was drafted.
        verify={size: statistics.median(s for tree, s in verify.items() if tree[2] == size) for size in sizes},
        rest={
            shape: {tree[2]: seconds for tree, seconds in rest.items() if tree[:2] == shape}
            for shape in dict.fromkeys(tree[:2] for tree in trees)
        },
        plain=statistics.median(plain[1:]),
    )


def _interpolate(at: float, measured: dict[int, float]) -> float:
    return float(np.interp(at, list(measured), list(measured.values())))


def _plain_step(target: PreTrainedModel, ids: torch.Tensor, settings: dict) -> float:
    """Returns the seconds of a step: those of a long generation less those of a short one."""
    seconds = []
    num_tokens = settings["max_new_tokens"]
    for count in (1, num_tokens):
        synchronize(target.device)
        begin = time.perf_counter()
        target.generate(ids, **settings | {"max_new_tokens": count, "min_new_tokens": count})
        synchronize(target.device)
        seconds.append(time.perf_counter() - begin)
    return (seconds[1] - seconds[0]) / max(num_tokens - 1, 1)
