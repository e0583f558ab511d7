"""The recipes of `gumiho train`."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """
    Attributes:
        phases: Trainings by name, each of which begins with the drafter of the one before it: fields of
            `GumihoTrainingArguments`, where the user gives no others.
        further: Such fields for training a drafter that exists, all of its parts at once.
        config: Fields of the drafter's config.
        vocabulary_share: Share of the target's tokens that a new drafter drafts.
        packing: Whether a row holds several texts.
    """

    phases: dict[str, dict[str, Any]]
    further: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    vocabulary_share: float = 1.0
    packing: bool = True


_COMMON = {"unroll_serial_head": True, "lr_scheduler_type": "cosine", "warmup_steps": 20}
# The serial head first, from the linear start and on its own features; then the parallel heads and their transitions
# on what it has become.
_SERIAL = _COMMON | {
    "train_only": "serial", "linear_start": True, "learning_rate": 3e-4, "serial_ce_weight": 1.0,
    "feature_weight": 0.1,
}  # fmt: skip
_HEADS = _COMMON | {
    "train_only": "parallel", "learning_rate": 4e-4, "serial_ce_weight": 0.0, "feature_weight": 0.0,
    "parallel_ce_weight": 1.0,
}  # fmt: skip
# Both parts at once: each has learned its task before, and adapts to new data.
_FURTHER = _COMMON | {
    "serial_ce_weight": 1.0, "feature_weight": 0.1, "parallel_weight": 1.0, "parallel_ce_weight": 1.0,
    "parallel_ce_start": 0.0,
}  # fmt: skip

RECIPES = {
    "recommended": Recipe(
        phases={"serial": _SERIAL, "heads": _HEADS},
        further=_FURTHER,
        config={"transition_rank": 64},
        vocabulary_share=0.25,
        packing=False,  # steps of few tokens train better than few steps of many
    ),
    "published": Recipe(phases={"published": {}}),
}
