"""The draft temperature of each depth, fitted on held-out positions at the end of training.

A path's score is the product of its tokens' probabilities, so an overconfident deep head displaces better nodes. Under
the fitted temperatures the target's own choices are most likely, at the positions that decoding would reach: those
before which the text, too, holds what the target chooses.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ..commands import UserValueError
from ..model.modeling_gumiho import GumihoModel
from ..model.outputs import GumihoOutput
from .losses.chunked import DEFAULT_CHUNK_SIZE, pieces
from .losses.positions import select_positions
from .losses.predictors import LossWeights, predictions_of
from .losses.terms import LMHead


logger = logging.get_logger(__name__)

# Rows to fit on, and the most positions of each depth in them. A temperature's relative error is about one by the
# square root of these.
NUM_ROWS, NUM_POSITIONS = 64, 2048
# Close enough for the parabola through three of them to be the curve: the loss is smooth in the log of T.
LOG_TEMPERATURES = torch.linspace(math.log(0.1), math.log(3.0), 25, dtype=torch.float64, device="cpu")
_TEMPERATURES = LOG_TEMPERATURES.exp().tolist()


@torch.no_grad()
def score_choices(
    output: GumihoOutput,
    hidden_states: torch.Tensor,
    lm_head: LMHead,
    loss_mask: torch.Tensor,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    vocabulary: tuple[torch.Tensor | None, LMHead] | None = None,
    positions_per_row: int = NUM_POSITIONS,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> torch.Tensor:
    """
    Scores the drafter's predictions of what the target chooses in a batch of texts `(B, L)`. Arguments as in
    [`score_predictions`]; choices that may not be drafted do not count. A row has at most `positions_per_row`
    positions of each depth, on average.

    Returns:
        `(B, Q, G + 1)`: for each of the `Q` depths the negative log-likelihood (nats) of the target's choices under
        each temperature `exp(LOG_TEMPERATURES[g])`, summed over the row's positions, and last the number of these.
    """
    predictions = predictions_of(output, LossWeights())
    selected = select_positions(predictions, hidden_states, loss_mask, position_ids)
    token_ids, draft_head = vocabulary or (None, lm_head)
    found = [lm_head(selected.targets[p]).argmax(dim=-1) for p in pieces(len(selected.rows), chunk_size)]
    choices = torch.cat([*found, input_ids.new_zeros(0)])
    indices = choices if token_ids is None else _indices(choices, token_ids)
    shifts = [predictor.shift for predictor, _ in predictions]
    counted = selected.valid & _on_path(shifts, choices, input_ids, loss_mask) & (indices >= 0)
    table = torch.zeros(len(input_ids), len(shifts), len(LOG_TEMPERATURES) + 1, device=hidden_states.device)
    for depth, of_depth in enumerate(counted):
        places = of_depth.nonzero().squeeze(1)
        places = places[:: max(-(-len(places) // (positions_per_row * len(input_ids))), 1)]
        for piece in places.split(chunk_size):
            losses = _losses(draft_head(selected.features[depth, piece]), indices[piece])
            finite = losses.isfinite().all(dim=1)
            scores = torch.cat((losses, torch.ones_like(losses[:, :1])), dim=1)[finite]
            table[:, depth].index_add_(0, selected.rows[piece][finite], scores)
    return table


def fit_temperatures(table: np.ndarray) -> list[float] | None:
    """
    Returns the temperature of each depth under which the target's choices are most likely, for what [`score_choices`]
    returned for all rows `(rows, Q, G + 1)`. One that no position reaches has that of the depth above; `None` where
    there are no positions at all.
    """
    found: list[float] = []
    for scores in torch.from_numpy(table).double().sum(dim=0):
        if scores[-1] == 0 and not found:
            return None
        found.append(found[-1] if scores[-1] == 0 else round(_lowest(scores[:-1] / scores[-1]), 3))
    return found


def drop_break_even(drafter: GumihoModel) -> None:
    """Removes a drafter's `break_even`, which was measured with its earlier weights and trees."""
    if getattr(drafter.generation_config, "break_even", None) is not None:
        drafter.generation_config.break_even = None
        logger.warning(
            "Removed the drafter's `break_even`, which was measured before its weights or draft temperatures changed. "
            "Run `gumiho tune` to measure it again."
        )


def rows_to_fit_on(dataset: Any) -> Any:
    """Returns evenly spread rows of a dataset. Raises `ValueError` for no rows, a stream, or several datasets."""
    if isinstance(dataset, Mapping) or not has_length(dataset) or not len(dataset):
        raise UserValueError(
            "Draft temperatures are fitted on texts that were not trained on. Give a `dataset` that has rows, one of "
            "several: `calibrate(datasets[name])`."
        )
    return torch.utils.data.Subset(dataset, range(0, len(dataset), -(-len(dataset) // NUM_ROWS)))


def _losses(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns `(n, G)`: `-log softmax(logits / T)` of tokens `(n,)` under each temperature, for logits `(n, V)`."""
    logits = logits.float()  # no device has to know float64: MPS does not
    chosen = logits.gather(1, tokens.to(logits.device)[:, None]).squeeze(1)
    return torch.stack([(logits / t).logsumexp(dim=-1) - chosen / t for t in _TEMPERATURES], dim=1)


def _lowest(curve: torch.Tensor) -> float:
    lowest, shift = int(curve.argmin()), 0.0
    if 0 < lowest < len(curve) - 1:
        left, middle, right = curve[lowest - 1 : lowest + 2].tolist()
        bend = left - 2 * middle + right
        shift = (left - right) / (2 * bend) if bend > 0 else 0.0
    step = LOG_TEMPERATURES[1] - LOG_TEMPERATURES[0]
    return float((LOG_TEMPERATURES[lowest] + shift * step).exp())


def _indices(tokens: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the index of each of tokens `(N,)` in `token_ids` `(K,)`, -1 where it is absent."""
    order = token_ids.argsort()
    found = order[torch.searchsorted(token_ids[order], tokens).clamp_(max=len(token_ids) - 1)]
    return found.masked_fill(token_ids[found] != tokens, -1)


def _on_path(
    shifts: Sequence[int], choices: torch.Tensor, input_ids: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    """Returns `(Q, N)`: whether the text between what a prediction has read and its choice holds choices only."""
    chosen = torch.full_like(input_ids, -1)
    chosen[loss_mask.bool()] = choices.to(chosen)
    differs = torch.ones_like(input_ids)
    differs[:, :-1] = (chosen[:, :-1] != input_ids[:, 1:]).long()
    before = torch.nn.functional.pad(differs.cumsum(dim=1), (1, 0))  # differences before each column
    rows, columns = loss_mask.nonzero(as_tuple=True)
    num_before = before[rows, columns]
    starts = [(columns - shift + 1).clamp(min=0) for shift in shifts]
    return torch.stack([num_before == before[rows, start] for start in starts])
