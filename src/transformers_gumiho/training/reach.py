"""How often decoding reaches each draft position, measured while a drafter is trained."""

import torch
from transformers import Trainer

from .agreement import AGREEMENTS, POSITIONS


# Steps between measurements, each of which costs a pass of the drafter without a gradient.
MEASURED_EVERY = 25
# What a measurement keeps of those before it: about the last ten count.
_KEPT = 0.9
# Every position counts a little, so that one that is never reached yet is learned all the same.
_LEAST = 0.01


class MeasuredReach:
    """
    The share of cycles in which decoding reaches each draft position: the product of the shares in which the drafts
    above it are the target's first choice. These are running averages over the training texts.

    Args:
        trainer: The drafter's trainer.
        num_positions: Of a draft.
    """

    def __init__(self, trainer: Trainer, num_positions: int):
        self._trainer = trainer
        self._num_positions = num_positions
        self.reset()

    def reset(self) -> None:
        """Forgets what was measured: another training begins."""
        self._measured_at: int | None = None
        self._agreements = torch.zeros(self._num_positions, dtype=torch.float64)
        self._positions = torch.zeros(self._num_positions, dtype=torch.float64)

    @property
    def is_due(self) -> bool:
        """Whether to measure in this step: in the first one, and from then on every so many."""
        step = self._trainer.state.global_step
        return self._measured_at is None or step - self._measured_at >= MEASURED_EVERY

    def add(self, table: torch.Tensor) -> None:
        """Takes in the scores `(B, Q, 2 + T)` of a batch; see [`score_predictions`]."""
        sums = self._trainer.accelerator.reduce(table[..., [AGREEMENTS, POSITIONS]].sum(dim=0), "sum").cpu().double()
        self._agreements = _KEPT * self._agreements + sums[:, 0]
        self._positions = _KEPT * self._positions + sums[:, 1]
        self._measured_at = self._trainer.state.global_step

    def weights(self) -> tuple[float, ...]:
        """Returns the share for each draft position, 1 for the first, and at least 0.01."""
        shares = self._agreements / self._positions.clamp(min=1)
        reached = torch.cat((torch.ones(1, dtype=torch.float64), shares[:-1].cumprod(dim=0)))
        return tuple(reached.clamp(min=_LEAST).tolist())
