"""The training losses without the logits of a whole batch: `gumiho_loss` in pieces of a few hundred positions.

The output head is frozen, so the gradient that the soft cross-entropy sends into a feature is known as soon as its
logits are: each piece computes its loss *and* its gradient, `(softmax(z) - p) W`, and lets its logits go. What stays
is one gradient as large as the features. Nothing is computed twice, and nothing at positions that do not count.

`N` positions that count, `Q` predictions per position, `H` hidden size, `V` vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..model.modeling_gumiho import GumihoOutput
from .terms import LossWeights, Predictor, feature_distances, predictions_of


LMHead = Callable[[torch.Tensor], torch.Tensor]
# Rows of logits held at a time: 131 MB in float32 with a vocabulary of 128k. Fewer would not keep a GPU busy.
DEFAULT_CHUNK_SIZE = 256


@dataclass(frozen=True)
class SelectedPositions:
    """
    The states of a batch that count as targets, and what the drafter predicted for each.

    Attributes:
        rows (`(N,)`): The row of each in the batch.
        targets (`(N, H)`): The states.
        features (`(Q, N, H)`): The prediction of each by each predictor; arbitrary where not `valid`.
        valid (`(Q, N)`): Whether the predictor has a position in the same text that predicts the state.
    """

    rows: torch.Tensor
    targets: torch.Tensor
    features: torch.Tensor
    valid: torch.Tensor


def select_positions(
    predictions: list[tuple[Predictor, torch.Tensor]],
    hidden_states: torch.Tensor,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor | None = None,
) -> SelectedPositions:
    """Gathers the positions that count; arguments as in [`gumiho_loss`]."""
    rows, columns = loss_mask.nonzero(as_tuple=True)
    positions = columns if position_ids is None else position_ids[rows, columns]
    return SelectedPositions(
        rows=rows,
        targets=hidden_states[rows, columns].detach(),
        features=torch.stack([_features_at(features, rows, columns - p.shift) for p, features in predictions]),
        valid=torch.stack([positions >= p.shift for p, _ in predictions]),
    )


def _features_at(features: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Returns `(N, H)`; what is before the beginning of a row is arbitrary."""
    if features.shape[1] == 0:  # the texts are too short for this predictor, which stays part of the graph
        features = torch.nn.functional.pad(features, (0, 0, 0, 1))
    return features[rows, columns.clamp(min=0, max=features.shape[1] - 1)]


def count_positions(
    loss_mask: torch.Tensor, shifts: list[int], position_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns `(Q,)`: the positions that each prediction of these shifts is averaged over."""
    if position_ids is None:
        position_ids = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    return torch.stack([(loss_mask.bool() & (position_ids >= shift)).sum() for shift in shifts])


def chunked_gumiho_loss(
    output: GumihoOutput,
    hidden_states: torch.Tensor,
    lm_head: LMHead,
    loss_mask: torch.Tensor,
    weights: LossWeights | None = None,
    position_ids: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """
    Computes what [`gumiho_loss`] computes, with at most `chunk_size` rows of logits of the drafter, and as many of the
    target, at a time. Its arguments have the same meaning; a cross-entropy of weight zero is not computed.

    Args:
        counts (`(Q,)`, *optional*): The number of positions that each term is to be averaged over, where the batch is
            a part of a larger one. By default those of this batch.
        chunk_size: Rows of logits held at a time.

    Returns:
        The loss and its unweighted terms, as in [`gumiho_loss`], each of a single number.
    """
    predictions = predictions_of(output, weights or LossWeights())
    selected = select_positions(predictions, hidden_states, loss_mask, position_ids)
    if counts is None:
        counts = selected.valid.sum(dim=1)
    scale = selected.valid / counts.clamp(min=1)[:, None].to(torch.float32)
    term_weights = [(p.feature_weight, p.cross_entropy_weight) for p, _ in predictions]
    loss, term_values = _ChunkedLoss.apply(
        selected.features, selected.targets, scale, term_weights, lm_head, chunk_size
    )
    terms = {}
    for (predictor, _), (feature, cross_entropy) in zip(predictions, term_values.unbind(), strict=True):
        terms[f"{predictor.name}_feature"] = feature
        if predictor.cross_entropy_weight:
            terms[f"{predictor.name}_ce"] = cross_entropy
    return loss, terms


class _ChunkedLoss(torch.autograd.Function):
    """Weighted sum of all terms, and `(Q, 2)` unweighted terms; the gradient is computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        features: torch.Tensor,
        targets: torch.Tensor,
        scale: torch.Tensor,
        term_weights: list[tuple[float, float]],
        lm_head: LMHead,
        chunk_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # In float32 also for half-precision features: divided by the number of positions it would underflow.
        gradient = torch.zeros_like(features, dtype=torch.float32)
        terms = torch.zeros(len(term_weights), 2, dtype=torch.float32, device=features.device)
        loss = torch.zeros((), dtype=torch.float32, device=features.device)
        needs_head = any(cross_entropy_weight for _, cross_entropy_weight in term_weights)
        for piece in _pieces(len(targets), chunk_size):
            target = targets[piece]
            target_probs = lm_head(target).float().softmax(dim=-1) if needs_head else None
            for index, weights in enumerate(term_weights):
                values, gradient[index, piece] = _piece_loss(
                    features[index, piece], target, target_probs, scale[index, piece], weights, lm_head
                )
                terms[index] += values
                loss += values[0] * weights[0] + values[1] * weights[1]
        ctx.save_for_backward(gradient)
        ctx.dtype = features.dtype
        ctx.mark_non_differentiable(terms)
        return loss, terms

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_outputs[0]).to(ctx.dtype), None, None, None, None, None


def _pieces(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))


def _piece_loss(
    features: torch.Tensor,
    targets: torch.Tensor,
    target_probs: torch.Tensor | None,
    scale: torch.Tensor,
    weights: tuple[float, float],
    lm_head: LMHead,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the two terms of a piece, summed under `scale`, and the gradient `(n, H)` of their weighted sum."""
    feature_weight, cross_entropy_weight = weights
    feature = feature_distances(features, targets)
    difference = features.float() - targets.float()
    gradient = difference.clamp_(-1, 1) * (scale * feature_weight / difference.shape[1])[:, None]
    cross_entropy = torch.zeros_like(feature)
    if target_probs is not None and cross_entropy_weight:
        with torch.enable_grad():
            leaf = features.detach().requires_grad_()
            logits = lm_head(leaf)
        cross_entropy, logits_gradient = _cross_entropy_and_gradient(logits.detach().float(), target_probs)
        (through_head,) = torch.autograd.grad(logits, leaf, logits_gradient.to(logits.dtype))
        # Scaled after the head: it computes in its own precision, in which the scaled gradient would underflow.
        gradient += through_head.float() * (scale * cross_entropy_weight)[:, None]
    return torch.stack([(feature * scale).sum(), (cross_entropy * scale).sum()]), gradient


def _cross_entropy_and_gradient(logits: torch.Tensor, target_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the soft cross-entropy `(n,)` of `(n, V)` logits, and the gradient of its sum."""
    log_normalizer = logits.logsumexp(dim=-1)
    expected_logit = (target_probs * logits).sum(dim=-1)
    gradient = logits.sub_(log_normalizer[:, None]).exp_().sub_(target_probs)
    return log_normalizer - expected_logit, gradient
