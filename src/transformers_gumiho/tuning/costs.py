"""What a cycle costs on this machine."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..measuring.decoding_settings import DRAFTER_ALONE
from ..measuring.timing import DecodingTime, time_drafted, time_plain
from ..model.modeling_gumiho import GumihoModel


Shape = tuple[int, int]  # branching factor and depth
Tree = tuple[int, int, int]  # with the number of drafted tokens
Name = TypeVar("Name")


@dataclass(frozen=True)
class CycleCosts:
    """
    Measured seconds, and between the measured sizes what lies between.

    Attributes:
        verify: For each number of drafted tokens, the seconds of the target's pass over the tree.
        rest: For each branching factor and tree depth, the seconds of all else in a cycle (drafting and keeping the
            books) for each number of drafted tokens.
        plain: Seconds of a step of plain decoding.
        setup: Seconds before the first cycle of a text, its prompt aside: making ready, and the draft after it. The
            median over all shapes.
    """

    verify: dict[int, float]
    rest: dict[Shape, dict[int, float]]
    plain: float
    setup: float = 0.0

    def verify_seconds(self, num_assistant_tokens: int) -> float:
        """Returns the seconds of verifying `num_assistant_tokens` drafted tokens."""
        return _interpolate(num_assistant_tokens, self.verify)

    def cycle_seconds(self, num_assistant_tokens: int, branching_factor: int, tree_depth: int) -> float:
        """
        Returns the seconds of a cycle with a tree of `num_assistant_tokens` drafted tokens and `tree_depth` levels;
        `branching_factor` must be one that was measured.
        """
        # No path is longer than the tree has tokens.
        at_depths = {
            min(depth, num_assistant_tokens): _interpolate(num_assistant_tokens, seconds)
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
    context: torch.Tensor,
    sizes: Sequence[int],
    branching_factors: Sequence[int],
    max_new_tokens: int,
    repeats: int = 3,
    **generate_kwargs: Any,
) -> CycleCosts:
    """
    Times cycles of every shape after `context` `(T,)`, in turns, so that a machine that drifts hurts all shapes alike.

    Args:
        target: The target.
        drafter: The drafter. Its settings are as before afterwards.
        context: Token ids, as many as cycles are to be timed after.
        sizes: Drafted tokens of the trees, increasing.
        branching_factors: Tokens kept at a serial step.
        max_new_tokens: Tokens of each run; its cycles are averaged. At least enough for two of them are decoded.
        repeats: Runs of each shape, of which the median counts.
        **generate_kwargs: For `generate()`.

    Raises:
        ValueError: The target ends its texts before two cycles.
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
    # The prompt's token, the longest cycle, and one token of another.
    max_new_tokens = max(max_new_tokens, deepest + 3)
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens} | generate_kwargs
    timed, steps = _time_in_turns(target, drafter, context[None].to(target.device), trees, repeats, **settings)
    if any(taken.num_cycles < 2 for times in timed.values() for taken in times):
        raise ValueError(
            "The texts end in their first cycle, and no whole one can be timed. Check the target's settings."
        )
    verify, rest = {}, {}
    for tree, times in timed.items():
        verify[tree] = statistics.median(taken.verify_seconds for taken in times)
        rest[tree] = statistics.median(taken.cycle_seconds - taken.verify_seconds for taken in times)
    return CycleCosts(
        # The target's pass does not know how its tree was drafted.
        verify=smooth({size: statistics.median(s for tree, s in verify.items() if tree[2] == size) for size in sizes}),
        rest={
            shape: smooth({tree[2]: seconds for tree, seconds in rest.items() if tree[:2] == shape})
            for shape in dict.fromkeys(tree[:2] for tree in trees)
        },
        plain=statistics.median(taken.seconds / taken.num_tokens for taken in steps),
        setup=statistics.median(taken.setup_seconds for times in timed.values() for taken in times),
    )


def _time_in_turns(
    target: PreTrainedModel,
    drafter: GumihoModel,
    ids: torch.Tensor,
    trees: Sequence[Tree],
    repeats: int,
    **generate_kwargs: Any,
) -> tuple[dict[Tree, list[DecodingTime]], list[DecodingTime]]:
    """Returns the `repeats` runs with each of `trees`, sorted by shape, and those without a drafter in between."""
    timed: dict[Tree, list[DecodingTime]] = {}
    steps: list[DecodingTime] = []
    with without_end(target):
        for repeat in range(repeats + 1):
            if repeat == 1:  # the runs before this one were a warm-up
                timed, steps = {}, []
            shape = None
            for tree in tqdm(trees, desc=f"timing cycles, {repeat} of {repeats}", unit="shape", leave=False):
                if tree[:2] != shape:
                    # All along, as what a cycle costs in such steps is what stays when the machine's speed changes.
                    steps.append(time_plain(target, ids, **generate_kwargs))
                    shape = tree[:2]
                settings = dict(zip(("branching_factor", "tree_depth", "num_assistant_tokens"), tree, strict=True))
                taken = time_drafted(target, drafter, ids, settings | DRAFTER_ALONE, split=True, **generate_kwargs)
                timed.setdefault(tree, []).append(taken)
    return timed, steps


@torch.inference_mode()
def measure_cycles(
    target: PreTrainedModel,
    drafter: GumihoModel,
    context: torch.Tensor,
    settings: Mapping[Name, dict[str, Any]],
    max_new_tokens: int,
    repeats: int = 3,
    **generate_kwargs: Any,
) -> tuple[dict[Name, float], float]:
    """
    Times whole cycles after `context` `(T,)` under several decoding settings, and steps of plain decoding, in turns.

    Args:
        target: The target.
        drafter: The drafter. Its settings are as before afterwards.
        context: Token ids.
        settings: Decoding settings of the drafter, by name.
        max_new_tokens: Tokens of each run, at least 2; its cycles are averaged.
        repeats: Runs under each, of which the median counts.
        **generate_kwargs: For `generate()`.

    Returns:
        Seconds of a cycle under each, and of a step of plain decoding.
    """
    steps: list[float] = []
    # In steps of plain decoding right before: a machine that is slow for a while is so for both.
    ratios: dict[Name, list[float]] = {name: [] for name in settings}
    ids = context[None].to(target.device)
    options = {"do_sample": False, "max_new_tokens": max_new_tokens} | generate_kwargs
    with without_end(target):
        for _ in range(repeats + 1):  # the first one warms up
            for name, of_name in settings.items():
                taken = time_plain(target, ids, **options)
                steps.append(taken.seconds / taken.num_tokens)
                taken = time_drafted(target, drafter, ids, of_name | DRAFTER_ALONE, **options)
                ratios[name].append(taken.seconds / taken.num_cycles / steps[-1])
    step = statistics.median(steps[len(settings) :])
    return {name: step * statistics.median(of_name[1:]) for name, of_name in ratios.items()}, step


@contextmanager
def without_end(target: PreTrainedModel) -> Iterator[None]:
    """
    Lets all runs decode the same number of tokens, past the text's end if need be. A minimum length would do that by a
    processor that looks at the prefix, which makes decoding slower than what is to be predicted.
    """
    config = target.generation_config
    before, config.eos_token_id = config.eos_token_id, None
    try:
        yield
    finally:
        config.eos_token_id = before


def smooth(measured: Mapping[int, float]) -> dict[int, float]:
    """
    Returns the never decreasing costs that are closest to those measured (least squares), for increasing sizes.

    A larger tree costs no less; where it was measured to, that is noise, which would make one size look lucky.
    Source: pool-adjacent-violators (Ayer et al. 1955).
    """
    pools: list[tuple[float, int]] = []
    for seconds in measured.values():
        mean, count = seconds, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    values = [mean for mean, count in pools for _ in range(count)]
    return dict(zip(measured, values, strict=True))


def _interpolate(at: float, measured: dict[int, float]) -> float:
    return float(np.interp(at, list(measured), list(measured.values())))
