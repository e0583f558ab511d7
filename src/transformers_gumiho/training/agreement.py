"""How far a drafter's predictions agree with the target's on a text, and the acceptance length that this implies."""

from collections.abc import Sequence

import numpy as np
import torch

from ..losses.chunked import DEFAULT_CHUNK_SIZE, LMHead, select_positions
from ..losses.terms import LossWeights, Predictor, cross_entropies, feature_distances, predictions_of
from ..model.modeling_gumiho import GumihoOutput


# The columns of a score table.
AGREEMENTS, POSITIONS, FEATURE_LOSS, CROSS_ENTROPY = range(4)


@torch.no_grad()
def score_predictions(
    output: GumihoOutput,
    hidden_states: torch.Tensor,
    lm_head: LMHead,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> torch.Tensor:
    """
    Scores each prediction of each row. Arguments as in [`gumiho_loss`], with an output made with `unroll=True`, so
    that prediction q is the drafter's at draft position q + 1.

    Returns:
        `(B, Q, 4)`: sums over the row's positions of the top-1 agreements with the target, of 1, of the smooth-L1
        loss and of the soft cross-entropy.
    """
    predictions = predictions_of(output, LossWeights())
    selected = select_positions(predictions, hidden_states, loss_mask, position_ids)
    table = torch.zeros(len(loss_mask), len(predictions), 4, device=hidden_states.device)
    for start in range(0, len(selected.rows), chunk_size):
        piece = slice(start, start + chunk_size)
        rows, targets = selected.rows[piece], selected.targets[piece]
        probs = lm_head(targets).float().softmax(dim=-1)
        top_tokens = probs.argmax(dim=-1)
        for index in range(len(predictions)):
            features, valid = selected.features[index, piece], selected.valid[index, piece].float()
            logits = lm_head(features).float()
            scores = torch.stack(
                [
                    (logits.argmax(dim=-1) == top_tokens).float(),
                    torch.ones_like(valid),
                    feature_distances(features, targets),
                    cross_entropies(logits, probs),
                ],
                dim=-1,
            )
            table[:, index].index_add_(0, rows, scores * valid[:, None])
    return table


def expected_acceptance_length(agreements: Sequence[float]) -> float:
    """
    Returns the tokens that a cycle commits on average where the draft at position k is right with probability
    `agreements[k]` if those before it are: `1 + p_1 + p_1 p_2 + ...`, the bonus token included.

    Source: the expectation that arXiv 2503.10135 maximises, plus the bonus token, as in the measured tau.
    """
    return float(1 + np.cumprod(agreements).sum())


def agreement_metrics(table: np.ndarray, drafter_predictors: Sequence[Predictor]) -> dict[str, float]:
    """
    Turns score tables into metrics.

    Args:
        table (`(rows, Q, 4)`): What [`score_predictions`] returned, for all rows of an evaluation.
        drafter_predictors: The `Q` predictors, with the weights under which their terms are summed into `loss`.

    Returns:
        `loss`, its terms, the top-1 `agreement_k` at each draft position k = 1..Q, and the
        `expected_acceptance_length` that these imply.
    """
    sums = table.sum(axis=0, dtype=np.float64)
    means = sums / np.maximum(sums[:, POSITIONS : POSITIONS + 1], 1)
    metrics = {"loss": 0.0, "expected_acceptance_length": expected_acceptance_length(means[:, AGREEMENTS])}
    for position, (predictor, mean) in enumerate(zip(drafter_predictors, means, strict=True), start=1):
        feature, cross_entropy = float(mean[FEATURE_LOSS]), float(mean[CROSS_ENTROPY])
        metrics[f"agreement_{position}"] = float(mean[AGREEMENTS])
        metrics[f"{predictor.name}_feature"], metrics[f"{predictor.name}_ce"] = feature, cross_entropy
        metrics["loss"] += predictor.feature_weight * feature + predictor.cross_entropy_weight * cross_entropy
    return metrics
