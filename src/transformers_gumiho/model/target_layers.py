"""The layers of a target whose states a drafter reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..user_errors import UserValueError


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

    @classmethod
    def of_eagle3(cls, ids: Sequence[int] | None, num_layers: int) -> "TargetLayers":
        """
        Returns the layers of an EAGLE-3 head, by default those of its paper, for a target of `num_layers` layers.

        Raises:
            ValueError: The default layers of so small a target are not three.
        """
        if ids is None:
            ids = (1, num_layers // 2 - 1, num_layers - 4)
            if not ids[0] < ids[1] < ids[2]:
                raise UserValueError(
                    f"This EAGLE-3 head names no layers of the target, and a target of {num_layers} layers is too "
                    f"small for the three that EAGLE-3 reads by default. Pass `target_layer_ids=[...]`."
                )
        return cls(tuple(ids), is_last_normed=False)
