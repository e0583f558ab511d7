"""Measuring the table `cycle_costs`: what cycles of every size cost, in batches of several sizes."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..measuring.decoding_settings import DRAFTER_ALONE
from ..model.cycle_costs import CycleCostTable
from ..model.modeling_gumiho import GumihoModel
from ..target.machine import machine_name
from .answers import Answer, typical_context
from .costs import smooth, without_end
from .timing import time_drafted, time_plain


# Drafted tokens of the trees that are timed, and rows of the batches; what is between them is interpolated.
TIMED_SIZES = (0, 1, 3, 7, 12, 20, 32, 48, 63, 96, 128, 192, 256)
TIMED_BATCHES = (1, 4, 8)
_NEVER, _AT_ONCE = 1e9, 1.0


@torch.inference_mode()
def measure_cost_table(
    target: PreTrainedModel,
    drafter: GumihoModel,
    answers: Sequence[Answer],
    settings: dict[str, Any],
    max_new_tokens: int,
    repeats: int = 3,
    batch_sizes: Sequence[int] | None = None,
    **generate_kwargs: Any,
) -> CycleCostTable:
    """
    Times cycles under `settings` with trees that are cut to every size, and steps of plain decoding, in turns.

    Args:
        target: The target.
        drafter: The drafter. Its settings are as before afterwards.
        answers: Texts; the cycles come after parts of them.
        settings: Decoding settings of the drafter; `num_assistant_tokens` is the largest size.
        max_new_tokens: Tokens of each run.
        repeats: A third of the times that each is timed, of which the median counts, told in steps of plain decoding
            of the same turn: the speed of a machine drifts, and what a few more nodes cost is little beside that.
        batch_sizes: Rows of the batches (default: 1, 4 and 8).
        **generate_kwargs: For `generate()`.
    """
    batch_sizes = TIMED_BATCHES if batch_sizes is None else batch_sizes
    largest = settings["num_assistant_tokens"]
    if settings["branching_factor"] == 1:
        largest = min(largest, settings["tree_depth"])
    sizes = [*(size for size in TIMED_SIZES if size < largest), largest]
    names = machine_name(target.device), str(target.dtype).removeprefix("torch.")
    forced = {size: settings | {"cycle_costs": forcing_table(size, *names)} | DRAFTER_ALONE for size in sizes}
    # The longest cycle leaves a whole one after it.
    options = {"do_sample": False, "max_new_tokens": max(max_new_tokens, 2 * drafter.config.max_draft_depth + 4)}
    options |= generate_kwargs
    verify: list[tuple[float, ...]] = []
    draft: list[float] = []
    plain: list[float] = []
    with without_end(target):
        for batch_size in tqdm(batch_sizes, desc="timing sizes", unit="batch size"):
            ids = typical_rows(answers, options["max_new_tokens"], batch_size).to(target.device)
            turns = [_time_turn(target, drafter, ids, forced, options) for _ in range(3 * repeats + 1)]
            passes, rests, steps = zip(*turns[1:], strict=True)  # the first one warms up
            verified = {size: _paired_median([turn[size] for turn in passes], steps) for size in sizes}
            verify.append(_milliseconds(smooth(verified).values()))
            draft += _milliseconds([_paired_median(rests, steps)])
            plain += _milliseconds([statistics.median(steps)])
    return CycleCostTable(*names, tuple(batch_sizes), tuple(sizes), tuple(verify), tuple(draft), tuple(plain))


def _time_turn(
    target: PreTrainedModel,
    drafter: GumihoModel,
    ids: torch.Tensor,
    forced: dict[int, dict[str, Any]],
    options: dict[str, Any],
) -> tuple[dict[int, float], float, float]:
    """Returns the seconds of the target's pass under each of the settings, of all else in a cycle, and of a step."""
    passes, rests = {}, []
    for size, settings in forced.items():
        # Small trees take many cycles, of which a dozen tell enough.
        length = min(options["max_new_tokens"], 12 * (size + 1))
        taken = time_drafted(target, drafter, ids, settings, split=True, **options | {"max_new_tokens": length})
        passes[size] = taken.verify_seconds
        rests.append(taken.cycle_seconds - taken.verify_seconds)
    step = time_plain(target, ids, **options)
    return passes, statistics.median(rests), step.seconds / step.num_tokens


def _paired_median(seconds: Sequence[float], steps: Sequence[float]) -> float:
    """
    Returns the median of times that were each taken in the same turn as a step, told by the median of the steps:
    what matters is how they compare, and a machine's speed drifts meanwhile.
    """
    ratios = [taken / step for taken, step in zip(seconds, steps, strict=True)]
    return statistics.median(ratios) * statistics.median(steps)


def forcing_table(size: int, machine: str, dtype: str) -> dict[str, Any]:
    """Returns the table of a machine on which nothing but cycles with `size` drafted tokens pays."""
    sizes = sorted({0, max(size - 1, 0), size, size + 1})
    verify = [_AT_ONCE if timed == size else _NEVER for timed in sizes]
    table = CycleCostTable(
        machine, dtype, (1,), tuple(sizes), (tuple(verify),), draft_ms=(_AT_ONCE,), plain_ms=(_NEVER,)
    )
    return table.as_dict()


def typical_rows(answers: Sequence[Answer], num_new_tokens: int, batch_size: int) -> torch.Tensor:
    """
    Returns `(batch_size, T)`: parts of the texts, each as long as [`typical_context`]. Different ones as far as there
    are, as rows that are alike advance together, which costs less.
    """
    length = len(typical_context(answers, num_new_tokens))
    rows = [answer.tokens[-length:] for answer in answers if len(answer.tokens) >= length]
    return torch.stack([rows[row % len(rows)] for row in range(batch_size)])


def _milliseconds(seconds: Any) -> tuple[float, ...]:
    return tuple(round(1e3 * value, 4) for value in seconds)
