"""Training losses of a Gumiho drafter, in plain eager form.

`B` batch size, `L` tokens of text, `H` hidden size, `V` vocabulary, `S` serial tokens, `P` parallel heads. The text
is `x_0 .. x_{L-1}` and `h_k` the target's last hidden state at `x_k`. The drafter reads tokens `x_1 ..` and states
`h_0 ..`; at position t its serial feature predicts `h_{t+1}` and parallel head i predicts `h_{t+1+S+i}`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..model.modeling_gumiho import GumihoOutput


@dataclass(frozen=True)
class LossWeights:
    """
    Weights of the loss terms; the defaults are the published recipe's (arXiv 2503.10135).

    Attributes:
        feature: Of the smooth-L1 term between features and hidden states.
        serial_cross_entropy: Of the soft cross-entropy of the serial head.
        parallel_cross_entropy: Of the soft cross-entropy of the parallel heads. The recipe holds it at zero for the
            first two epochs.
        decay: Parallel head i counts `decay ** (i + 1)`.
        parallel: Of the sum over all parallel heads.
        unrolled: Of each serial token beyond the first that was drafted from the drafter's own feature. The recipe
            has none; they are there where the drafter's forward pass was asked to `unroll`.
    """

    feature: float = 1.0
    serial_cross_entropy: float = 0.1
    parallel_cross_entropy: float = 0.1
    decay: float = 0.8
    parallel: float = 1 / 9
    unrolled: float = 1.0


@dataclass(frozen=True)
class Predictor:
    """
    One predictor of the drafter: the serial head, an unrolled step of it, or a parallel head.

    Attributes:
        name: `serial`, `unrolled_j` or `parallel_i`.
        shift: Its feature at position t predicts the target's state `t + shift`.
        feature_weight: Of its smooth-L1 term in the loss.
        cross_entropy_weight: Of its soft cross-entropy in the loss.
    """

    name: str
    shift: int
    feature_weight: float
    cross_entropy_weight: float


def predictors(num_serial_tokens: int, num_parallel_heads: int, unroll: bool, weights: LossWeights) -> list[Predictor]:
    """Returns the predictors of a drafter. With `unroll` the q-th of them makes the draft at position q + 1."""
    found = [Predictor("serial", 1, weights.feature, weights.serial_cross_entropy)]
    for step in range(1, num_serial_tokens if unroll else 1):
        found.append(
            Predictor(
                f"unrolled_{step}",
                1 + step,
                weights.unrolled * weights.feature,
                weights.unrolled * weights.serial_cross_entropy,
            )
        )
    for head in range(num_parallel_heads):
        weight = weights.parallel * weights.decay ** (head + 1)
        found.append(
            Predictor(
                f"parallel_{head}",
                1 + num_serial_tokens + head,
                weight * weights.feature,
                weight * weights.parallel_cross_entropy,
            )
        )
    return found


def predictions_of(output: GumihoOutput, weights: LossWeights) -> list[tuple[Predictor, torch.Tensor]]:
    """Returns each predictor of a drafter's output with its features `(B, T', H)`, in the order of [`predictors`]."""
    serial, parallel = output.serial_features, output.parallel_features
    if serial is None or parallel is None:
        raise ValueError("The loss needs the features of both the serial and the parallel heads.")
    unrolled = output.unrolled_features
    # In a text without a single path every count does: no head has a position.
    num_serial_tokens = serial.shape[1] - parallel.shape[2] if unrolled is None else len(unrolled) + 1
    found = predictors(num_serial_tokens, parallel.shape[1], unrolled is not None, weights)
    return list(zip(found, (serial, *(unrolled or ()), *parallel.unbind(dim=1)), strict=True))


def feature_distances(features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the smooth-L1 distance of each of `(..., H)` features to its target, averaged over `H`."""
    return F.smooth_l1_loss(features.float(), targets.float(), reduction="none").mean(dim=-1)


def cross_entropies(logits: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy (nats) of each of `(..., V)` logits to the target's distribution."""
    logits = logits.float()
    # As the probabilities sum to 1: -sum(p log softmax(z)) = logsumexp(z) - p z, which holds no second `(..., V)`.
    return logits.logsumexp(dim=-1) - (target_probs * logits).sum(dim=-1)


def feature_loss(features: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the distance of features to targets `(B, T, H)`, averaged over `mask` `(B, T)`."""
    return _masked_mean(feature_distances(features, targets), mask)


def soft_cross_entropy(logits: torch.Tensor, target_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy (nats) of logits to the target's distribution `(B, T, V)`, averaged over `mask`."""
    return _masked_mean(cross_entropies(logits, target_probs), mask)


def gumiho_loss(
    output: GumihoOutput,
    hidden_states: torch.Tensor,
    lm_head: Callable[[torch.Tensor], torch.Tensor],
    loss_mask: torch.Tensor,
    weights: LossWeights | None = None,
    position_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """
    Computes the loss of a drafter on a batch of text: the sum over its predictors of `w_f * smooth_l1(f, h)` and
    `w_ce * cross_entropy(lm_head(f), lm_head(h))`, for the feature f that predicts state h. Source: arXiv 2503.10135,
    with the weights and shifts of the published training code.

    Args:
        output: The drafter's output for tokens `x_1 ..` and states `.. h_{L-2}`.
        hidden_states (`(B, L, H)`): The target's last hidden states of the whole text.
        lm_head: The target's output head.
        loss_mask (`(B, L)`): 1 at the states that count as targets.
        weights: See [`LossWeights`].
        position_ids (`(B, L)`, *optional*): The position of each token in its own text, where a row holds several.
            No prediction counts across two texts.

    Returns:
        The loss and its unweighted terms: `serial_feature`, `serial_ce`, `parallel_i_feature` and so on, each
        averaged over the positions it has.

    Raises:
        ValueError: The output lacks the features of a head.
    """
    with torch.no_grad():
        target_probs = lm_head(hidden_states).float().softmax(dim=-1)
    if position_ids is None:
        position_ids = torch.arange(loss_mask.shape[1], device=loss_mask.device).expand_as(loss_mask)
    loss = hidden_states.new_zeros((), dtype=torch.float32)
    terms: dict[str, torch.Tensor] = {}
    for predictor, features in predictions_of(output, weights or LossWeights()):
        shift = predictor.shift
        # The text must be old enough at a state to hold the position that predicts it.
        mask = loss_mask[:, shift:].bool() & (position_ids[:, shift:] >= shift)
        features = features[:, : mask.shape[1]]
        feature = feature_loss(features, hidden_states[:, shift:], mask)
        cross_entropy = soft_cross_entropy(lm_head(features), target_probs[:, shift:], mask)
        terms[f"{predictor.name}_feature"], terms[f"{predictor.name}_ce"] = feature.detach(), cross_entropy.detach()
        loss = loss + predictor.feature_weight * feature + predictor.cross_entropy_weight * cross_entropy
    return loss, terms


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask = mask.to(values)
    return (values * mask).sum() / mask.sum().clamp(min=1)
