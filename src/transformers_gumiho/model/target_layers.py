"""The layers of a target whose states a drafter reads."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TargetLayers:
    """
    Layers of a target, by number: i is the output of layer i.

    Attributes:
        ids: The numbers, from 0 up and in rising order.
        is_last_normed: Whether the state of the last layer is the one after the final norm, which becomes logits. An
            EAGLE-3 head reads the one before.
    """

    ids: tuple[int, ...]
    is_last_normed: bool = True

    @classmethod
    def of(cls, ids: Sequence[int] | None) -> "TargetLayers | None":
        """Returns the layers of `target_layer_ids`; `None` for a drafter that reads the last state alone."""
        return None if ids is None else cls(tuple(ids))
