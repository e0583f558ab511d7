"""The positions of a batch that the loss is averaged over, and what the drafter predicted for each.

`N` positions that count, `Q` predictions per position, `H` hidden size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .predictors import Predictor


WHAT_COUNTS = (
    "A state counts where its token and the next one are the assistant's: see to `loss_mask`, or `labels` (-100 for "
    "all other tokens)."
)


class SelectedPositions(NamedTuple):
    """The states of a batch that count as targets, and what the drafter predicted for each."""

    rows: torch.Tensor  # (N,): of each in the batch
    targets: torch.Tensor  # (N, H): the states
    features: torch.Tensor  # (Q, N, H): the prediction of each by each predictor; arbitrary where not `valid`
    valid: torch.Tensor  # (Q, N): whether the predictor has a position in the same text that predicts the state


def select_positions(
    predictions: Sequence[tuple[Predictor, torch.Tensor]],
    hidden_states: torch.Tensor,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor | None = None,
) -> SelectedPositions:
    """Gathers the positions that count; arguments as in [`chunked_gumiho_loss`]."""
    rows, columns = loss_mask.nonzero(as_tuple=True)
    # The text must be old enough at a state to hold the position that predicts it.
    positions = columns if position_ids is None else position_ids[rows, columns]
    return SelectedPositions(
        rows=rows,
        targets=hidden_states[rows, columns].detach(),
        features=torch.stack([_features_at(features, rows, columns - p.shift) for p, features in predictions]),
        valid=torch.stack([positions >= p.shift for p, _ in predictions]),
    )


def count_positions(
    loss_mask: torch.Tensor, shifts: Sequence[int], position_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns `(Q,)`: the positions that each prediction of these shifts is averaged over."""
    if position_ids is None:
        position_ids = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    return torch.stack([(loss_mask.bool() & (position_ids >= shift)).sum() for shift in shifts])


def _features_at(features: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Returns `(N, H)`; what is before the beginning of a row is arbitrary."""
    if features.shape[1] == 0:  # the texts are too short for this predictor, which stays part of the graph
        features = torch.nn.functional.pad(features, (0, 0, 0, 1))
    return features[rows, columns.clamp(min=0, max=features.shape[1] - 1)]
