"""Measuring the table `cycle_costs`: what cycles of every size cost, in batches of several sizes."""

import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..drafting.tree_size import COMPILED_TREE_SIZES
from ..measuring.decoding_settings import DRAFTER_ALONE, decoding_settings
from ..measuring.timing import time_drafted, time_plain
from ..model.acceptance_curves import AcceptanceCurve
from ..model.cycle_costs import CycleCostTable, Numbers
from ..model.modeling_gumiho import GumihoModel
from ..target.machine import machine_and_dtype
from ..target.requirements import verification_kind
from .answers import Answer
from .contexts import Rows, ending_before, typical_rows
from .costs import smooth, without_end


# Drafted tokens of the trees that are timed, and rows of the batches; what is between them is interpolated. Drafting
# takes a serial pass more for two tokens than for one, and the parallel heads for three.
TIMED_SIZES = (0, 1, 2, 3, 7, 12, 20, 32, 48, 63, 96, 128, 192, 256)
TIMED_BATCHES = (1, 4, 8)
# Sampled cycles are timed with trees of these sizes alone: the target's passes are the same, and by how much all else
# takes longer than in greedy cycles depends on the depth of the tree, and no longer on its size where it is deepest.
_SAMPLED_SIZES = (1, 2, 3, 7, 12)
_NEVER, _AT_ONCE = 1e9, 1.0

# How often drafted tokens are accepted at each depth, `None` where nobody knows.
Curves = tuple[AcceptanceCurve, ...] | None


@dataclass(frozen=True)
class _Times:
    """
    Milliseconds of cycles, for each batch size.

    Attributes:
        sizes: Drafted tokens of the trees.
        verify: Of the target's pass, for each size.
        draft: Of all else in a cycle, for each size.
        plain: Of a step of plain decoding.
    """

    sizes: tuple[int, ...]
    verify: tuple[Numbers, ...]
    draft: tuple[Numbers, ...]
    plain: Numbers


@torch.inference_mode()
def measure_cost_table(
    target: PreTrainedModel,
    drafter: GumihoModel,
    answers: Sequence[Answer],
    settings: dict[str, Any],
    max_new_tokens: int,
    repeats: int = 3,
    batch_sizes: Sequence[int] | None = None,
    sampling: dict[str, Any] | None = None,
    curves: tuple[Curves, Curves] = (None, None),
) -> CycleCostTable:
    """
    Times greedy cycles under `settings` with trees of every size, and steps of plain decoding, in turns; then sampled
    ones, with trees of few sizes.

    Args:
        target: The target.
        drafter: The drafter. Its settings are as before afterwards.
        answers: Texts, at least one; the cycles come within them, in contexts as long as those of the average step of
            decoding them.
        settings: Decoding settings of the drafter; `num_assistant_tokens` is the largest size.
        max_new_tokens: Tokens of each run.
        repeats: Turns in which sampled cycles are timed; greedy ones take three times as many. The median counts, told
            in steps of plain decoding of the same turn: the speed of a machine drifts, and what a few more nodes cost
            is little beside that.
        batch_sizes: Rows of the batches (default: 1, 4 and 8). Those in which the target cannot verify drafts are left
            out of the table.
        sampling: How `generate()` is to sample (its arguments besides `do_sample`); by default no sampled cycles are
            timed.
        curves: How often drafted tokens are accepted, greedy and sampled, for the table and because reading them takes
            time, too.

    Raises:
        ValueError: The target cannot verify drafts in any of these batches, or a setting is out of range.
    """
    sizes = _timed_sizes(target, settings)
    # The longest cycle leaves a whole one after it.
    most = max(max_new_tokens, 2 * drafter.config.max_draft_depth + 4)
    batches = _verifiable_batches(target, drafter, settings, answers, batch_sizes or TIMED_BATCHES, most)
    forced = _forced_sizes(target, settings, sizes, curves)
    greedy = _measure_times(target, drafter, batches, forced, most, 3 * repeats, 1, {"do_sample": False})
    names = machine_and_dtype(target)
    table = CycleCostTable(*names, tuple(batches), sizes, greedy.verify, greedy.draft, greedy.plain, *curves)
    if sampling is None:
        return table
    few = {size: forced[size] for size in sizes if size in _SAMPLED_SIZES or size == sizes[-1] < _SAMPLED_SIZES[-1]}
    # A step takes the same whatever the size, and is timed often instead.
    sampled = _measure_times(target, drafter, batches, few, most, repeats, 3, sampling | {"do_sample": True})
    depth = 0 if _drafts_alike(forced) else settings["tree_depth"]
    draft, plain = _in_times_of(greedy, sampled, depth)
    return replace(table, sampled_draft_ms=draft, sampled_plain_ms=plain)


def _timed_sizes(target: PreTrainedModel, settings: dict[str, Any]) -> tuple[int, ...]:
    """Returns the sizes that are timed: of those that decoding chooses among, as another one would never be chosen."""
    largest = settings["num_assistant_tokens"]
    if settings["branching_factor"] == 1:
        largest = min(largest, settings["tree_depth"])
    config = target.generation_config
    chosen = COMPILED_TREE_SIZES if config.cache_implementation == "static" else TIMED_SIZES
    return (*(size for size in TIMED_SIZES if size < largest and size in chosen), largest)


def _forced_sizes(
    target: PreTrainedModel, settings: dict[str, Any], sizes: tuple[int, ...], curves: tuple[Curves, Curves]
) -> dict[int, dict[str, Any]]:
    """Returns for each size the settings under which every cycle has it, and drafts as much as decoding does then."""
    machine, dtype = machine_and_dtype(target)
    drafts_fewer = _drafts_fewer(target, settings)
    drafted = {size: max(size, 1) if drafts_fewer else sizes[-1] for size in sizes}
    return {
        size: settings
        | {"num_assistant_tokens": drafted[size], "cycle_costs": forcing_table(size, machine, dtype, curves)}
        | DRAFTER_ALONE
        for size in sizes
    }


def _drafts_alike(forced: dict[int, dict[str, Any]]) -> bool:
    """Returns whether as many tokens are drafted for all sizes."""
    return len({settings["num_assistant_tokens"] for settings in forced.values()}) == 1


def _drafts_fewer(target: PreTrainedModel, settings: dict[str, Any]) -> bool:
    """Returns whether fewer tokens are drafted where fewer are verified: neither in chains nor in fixed shapes."""
    is_fixed = target.generation_config.cache_implementation == "static"
    return settings["branching_factor"] > 1 and not is_fixed and verification_kind(target) == "tree"


def _measure_times(
    target: PreTrainedModel,
    drafter: GumihoModel,
    batches: dict[int, Rows],
    forced: dict[int, dict[str, Any]],
    max_new_tokens: int,
    num_turns: int,
    num_steps: int,
    generate_kwargs: dict[str, Any],
) -> _Times:
    sizes = tuple(forced)
    options = {"max_new_tokens": max_new_tokens} | generate_kwargs
    verify: list[Numbers] = []
    draft: list[Numbers] = []
    plain: list[float] = []
    kind = "sampled" if generate_kwargs["do_sample"] else "greedy"
    with without_end(target):
        for ids, mask in tqdm(batches.values(), desc=f"timing {kind} cycles", unit="batch size"):
            turns = [_time_turn(target, drafter, ids, mask, forced, num_steps, options) for _ in range(num_turns + 1)]
            passes, rests, steps = zip(*turns[1:], strict=True)  # the first one warms up
            verified = {size: _paired_median([turn[size] for turn in passes], steps) for size in sizes}
            drafted = {size: _paired_median([turn[size] for turn in rests], steps) for size in sizes}
            if _drafts_alike(forced):
                # What differs is noise, of which a growing curve would take the largest part for the truth.
                drafted = dict.fromkeys(sizes, statistics.median(drafted.values()))
            verify.append(_milliseconds(smooth(verified).values()))
            draft.append(_milliseconds(smooth(drafted).values()))
            plain += _milliseconds([statistics.median(steps)])
    return _Times(sizes, tuple(verify), tuple(draft), tuple(plain))


def _in_times_of(greedy: _Times, sampled: _Times, depth: int) -> tuple[tuple[Numbers, ...], Numbers]:
    """
    Returns milliseconds of drafting, for each batch size and each size of the greedy cycles, and of plain steps where
    tokens are sampled, in times of the greedy cycles. The target's passes are the same: they tell how the machine's
    speed has changed meanwhile. Trees of `depth` tokens and more are drafted as deep, and the noise of as many draws
    is read for them.
    """
    places = [greedy.sizes.index(size) for size in sampled.sizes]
    drafts, steps = [], []
    for number, (verify, draft) in enumerate(zip(greedy.verify, greedy.draft, strict=True)):
        passes = zip(places, sampled.verify[number], strict=True)
        speed = statistics.median(verify[place] / after for place, after in passes)
        longer = [speed * ms - draft[place] for place, ms in zip(places, sampled.draft[number], strict=True)]
        num_shallower = sum(size < depth for size in sampled.sizes)
        if deepest := longer[num_shallower:]:
            longer = longer[:num_shallower] + [statistics.median(deepest)] * len(deepest)
        added = np.interp(greedy.sizes, sampled.sizes, longer).clip(min=0.0)
        of_sizes = smooth(dict(zip(greedy.sizes, draft + added, strict=True)))
        drafts.append(tuple(round(float(ms), 4) for ms in of_sizes.values()))
        steps.append(round(speed * sampled.plain[number], 4))
    return tuple(drafts), tuple(steps)


def _verifiable_batches(
    target: PreTrainedModel,
    drafter: GumihoModel,
    settings: dict[str, Any],
    answers: Sequence[Answer],
    batch_sizes: Sequence[int],
    num_new_tokens: int,
) -> dict[int, Rows]:
    """
    Returns the rows of batches of each size, without the sizes in which the target cannot verify drafts.

    Raises:
        ValueError: It can in none of them.
    """
    positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    # A run of new tokens begins by half of its length before the end of the rows, and ends as far behind it.
    most = None if positions is None else max(positions - (num_new_tokens + 1) // 2, 1)
    batches: dict[int, Rows] = {}
    for batch_size in batch_sizes:
        rows = typical_rows(answers, batch_size, most)
        try:
            batches[batch_size] = _verifiable_rows(target, drafter, settings, rows)
        except ValueError as error:
            refusal = error
    if not batches:
        raise ValueError(
            f"{type(target).__name__} cannot verify drafts in batches of {tuple(batch_sizes)}, time others: {refusal}"
        ) from refusal
    return batches


def _verifiable_rows(target: PreTrainedModel, drafter: GumihoModel, settings: dict[str, Any], rows: Rows) -> Rows:
    """
    Returns rows on the target's device, their mask without padding for a target that cannot verify padded drafts.

    Raises:
        ValueError: It cannot verify drafts of so many rows.
    """
    ids, mask = (tensor.to(target.device) for tensor in rows)
    if len(ids) == 1:
        return ids, mask  # what is refused of a single row is told when it is timed
    options: dict[str, Any] = {"assistant_model": drafter, "max_new_tokens": 2, "do_sample": False}
    with decoding_settings(drafter, settings | DRAFTER_ALONE):
        with suppress(ValueError):
            target.generate(ids, attention_mask=mask, **options)
            return ids, mask
        target.generate(ids, attention_mask=torch.ones_like(mask), **options)
    return ids, torch.ones_like(mask)


def _time_turn(
    target: PreTrainedModel,
    drafter: GumihoModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    forced: dict[int, dict[str, Any]],
    num_steps: int,
    options: dict[str, Any],
) -> tuple[dict[int, float], dict[int, float], float]:
    """
    Returns the seconds of the target's pass and of all else in a cycle, under each of the settings, and of a step, the
    median of `num_steps` texts.
    """
    passes, rests = {}, {}
    for size, settings in forced.items():
        # Small trees take many cycles, of which a dozen tell enough.
        num_new = min(options["max_new_tokens"], 12 * (size + 1))
        before, mask_before = ending_before((ids, mask), num_new)
        torch.manual_seed(0)
        taken = time_drafted(
            target, drafter, before, settings, split=True, attention_mask=mask_before,
            **options | {"max_new_tokens": num_new},
        )  # fmt: skip
        passes[size] = taken.verify_seconds
        rests[size] = taken.cycle_seconds - taken.verify_seconds
    before, mask_before = ending_before((ids, mask), options["max_new_tokens"])
    steps = [time_plain(target, before, attention_mask=mask_before, **options) for _ in range(num_steps)]
    return passes, rests, statistics.median(step.seconds / step.num_tokens for step in steps)


def _paired_median(seconds: Sequence[float], steps: Sequence[float]) -> float:
    """
    Returns the median of times that were each taken in the same turn as a step, told by the median of the steps:
    what matters is how they compare, and a machine's speed drifts meanwhile.
    """
    ratios = [taken / step for taken, step in zip(seconds, steps, strict=True)]
    return statistics.median(ratios) * statistics.median(steps)


def forcing_table(size: int, machine: str, dtype: str, curves: tuple[Curves, Curves] = (None, None)) -> dict[str, Any]:
    """Returns the table of a machine on which nothing but cycles with `size` drafted tokens pays."""
    sizes = sorted({0, max(size - 1, 0), size, size + 1})
    verify = [_AT_ONCE if timed == size else _NEVER for timed in sizes]
    draft = (_AT_ONCE,) * len(sizes)
    table = CycleCostTable(machine, dtype, (1,), tuple(sizes), (tuple(verify),), (draft,), (_NEVER,), *curves)
    return table.as_dict()


def _milliseconds(seconds: Iterable[float]) -> Numbers:
    return tuple(round(1e3 * value, 4) for value in seconds)
