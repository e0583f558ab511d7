"""Trees whose sizes fit the moment: measuring what they need to know, and what they gain over the best fixed tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..model.cycle_costs import CycleCostTable
from ..model.modeling_gumiho import GumihoModel
from .arguments import TuningArguments
from .contest import PLAIN, decode_in_turns
from .cost_table import measure_cost_table
from .reliability import measure_acceptance_curves


# Tokens over which a size is timed.
TIMED_TOKENS = 32
# The largest size that a tree can have, in those of the best fixed tree.
_FACTORS = (1, 2)
_FIXED = "fixed"
# How much of the speed of the best fixed tree is as fast: two runs of the same way differ as much, and sizes that fit
# also know what batches cost and when not to draft.
_AS_FAST = 0.97


@dataclass(frozen=True)
class FittedSizes:
    """
    Attributes:
        table: What cycles cost, and how often drafted tokens are accepted.
        fixed: The size of the best fixed tree.
        measured: Tokens per second with sizes that fit, for each largest size.
        fixed_speed: Those of the best fixed tree.
        plain: Those of plain decoding.
    """

    table: CycleCostTable
    fixed: int
    measured: dict[int, float]
    fixed_speed: float
    plain: float

    @property
    def largest(self) -> int:
        """The largest size with which decoding was measured to be fastest."""
        return max(self.measured, key=lambda size: self.measured[size])

    @property
    def pays(self) -> bool:
        """Whether sizes that fit were measured to be as fast as the best fixed tree, as far as two runs can tell."""
        return self.measured[self.largest] >= _AS_FAST * self.fixed_speed

    @property
    def settings(self) -> dict[str, Any]:
        """What is to be decoded with, as fields of a generation config, in numbers, texts, lists and dictionaries."""
        if not self.pays:
            return {"num_assistant_tokens": self.fixed, "cycle_costs": None}
        return {"num_assistant_tokens": self.largest, "cycle_costs": self.table.as_dict()}


def fit_sizes(
    target: PreTrainedModel,
    drafter: GumihoModel,
    prompts: Sequence[torch.Tensor],
    settings: dict[str, Any],
    args: TuningArguments,
) -> FittedSizes:
    """
    Measures what sizes that fit need to know, and lets them decode `prompts` in turns with the best fixed tree.

    Args:
        target: The target.
        drafter: The drafter. Its settings stay as they are.
        prompts: Token ids `(T,)` of each prompt.
        settings: Those of the best fixed tree.
        args: Those of tuning.
    """
    fixed, most = settings["num_assistant_tokens"], args.max_tree_size
    sizes = sorted({max(min(factor * fixed, most), 1) for factor in _FACTORS})
    if settings["branching_factor"] == 1:
        sizes = [min(fixed, settings["tree_depth"])]
    unfitted = settings | {"num_assistant_tokens": sizes[-1], "cycle_costs": None}
    sampling: dict[str, Any] = {"do_sample": True, "temperature": args.temperature or 1.0, "top_k": 0}
    profiled = target, drafter, prompts, args.max_new_tokens, unfitted
    greedy_curves, answers = measure_acceptance_curves(*profiled)
    sampling_curves, _ = measure_acceptance_curves(*profiled, **sampling)
    table = measure_cost_table(
        target, drafter, answers, unfitted, min(args.max_new_tokens, TIMED_TOKENS), args.repeats,
        sampling=sampling, curves=(greedy_curves, sampling_curves),
    )  # fmt: skip
    ways = {size: settings | {"num_assistant_tokens": size, "cycle_costs": table.as_dict()} for size in sizes}
    of_prompts = {_FIXED: settings | {"cycle_costs": None}, **ways}
    speeds = decode_in_turns(
        target, drafter, prompts, {name: [way] * len(prompts) for name, way in of_prompts.items()},
        args.max_new_tokens, **(sampling if args.temperature else {}),
    )  # fmt: skip
    return FittedSizes(table, fixed, {size: speeds[size] for size in sizes}, speeds[_FIXED], speeds[PLAIN])
