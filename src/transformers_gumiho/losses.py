"""Training losses of a Gumiho drafter, in plain eager form.

`B` batch size, `L` tokens of text, `H` hidden size, `V` vocabulary, `S` serial tokens, `P` parallel heads. The text
is `x_0 .. x_{L-1}` and `h_k` the target's last hidden state at `x_k`. The drafter reads tokens `x_1 ..` and states
`h_0 ..`; at position t its serial feature predicts `h_{t+1}` and parallel head i predicts `h_{t+1+S+i}`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .configuration_gumiho import GumihoConfig
from .modeling_gumiho import GumihoOutput


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
class Prediction:
    """
    One predictor of the drafter: the serial head, an unrolled step of it, or a parallel head.

    Attributes:
        name: `serial`, `unrolled_j` or `parallel_i`.
        features (`(B, T', H)`): What it predicts at each position.
        shift: The feature at t predicts the target's state `t + shift`.
        feature_weight: Of its smooth-L1 term in the loss.
        cross_entropy_weight: Of its soft cross-entropy in the loss.
    """

    name: str
    features: torch.Tensor
    shift: int
    feature_weight: float
    cross_entropy_weight: float


def predictions_of(output: GumihoOutput, weights: LossWeights) -> list[Prediction]:
    """Returns the predictions in a drafter's output, in the order of [`prediction_shifts`]."""
    serial, parallel = output.serial_features, output.parallel_features
    if serial is None or parallel is None:
        raise ValueError("The loss needs the features of both the serial and the parallel heads.")
    serial_weights = weights.feature, weights.serial_cross_entropy
    predictions = [Prediction("serial", serial, 1, *serial_weights)]
    for step, features in enumerate(output.unrolled_features or (), start=1):
        scaled = (weights.unrolled * weight for weight in serial_weights)
        predictions.append(Prediction(f"unrolled_{step}", features, 1 + step, *scaled))
    num_serial_tokens = serial.shape[1] - parallel.shape[2]
    for head, features in enumerate(parallel.unbind(dim=1)):
        weight = weights.parallel * weights.decay ** (head + 1)
        predictions.append(
            Prediction(
                f"parallel_{head}",
                features,
                1 + num_serial_tokens + head,
                weight * weights.feature,
                weight * weights.parallel_cross_entropy,
            )
        )
    return predictions


def prediction_shifts(config: GumihoConfig, unroll: bool) -> list[int]:
    """Returns the shift of each prediction that a drafter's forward pass makes."""
    first_of_heads = 1 + config.num_serial_tokens
    serial = range(1, first_of_heads if unroll else 2)
    return [*serial, *range(first_of_heads, first_of_heads + config.num_parallel_heads)]


def feature_loss(features: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the smooth-L1 distance of features to targets `(B, T, H)`, averaged over `H` and `mask` `(B, T)`."""
    return _masked_mean(F.smooth_l1_loss(features.float(), targets.float(), reduction="none").mean(dim=-1), mask)


def soft_cross_entropy(logits: torch.Tensor, target_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy (nats) of logits to the target's distribution `(B, T, V)`, averaged over `mask`."""
    logits = logits.float()
    # As the probabilities sum to 1: -sum(p log softmax(z)) = logsumexp(z) - p z, which holds no second `(B, T, V)`.
    expected_logit = torch.einsum("btv,btv->bt", target_probs, logits)
    return _masked_mean(logits.logsumexp(dim=-1) - expected_logit, mask)


def gumiho_loss(
    output: GumihoOutput,
    hidden_states: torch.Tensor,
    lm_head: Callable[[torch.Tensor], torch.Tensor],
    loss_mask: torch.Tensor,
    weights: LossWeights | None = None,
    position_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """
    Computes the loss of a drafter on a batch of text.

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
    """
    with torch.no_grad():
        target_probs = lm_head(hidden_states).float().softmax(dim=-1)
    if position_ids is None:
        position_ids = torch.arange(loss_mask.shape[1], device=loss_mask.device).expand_as(loss_mask)
    loss = hidden_states.new_zeros((), dtype=torch.float32)
    terms: dict[str, torch.Tensor] = {}
    for prediction in predictions_of(output, weights or LossWeights()):
        shift = prediction.shift
        # The text must be old enough at a state to hold the position that predicts it.
        mask = loss_mask[:, shift:].bool() & (position_ids[:, shift:] >= shift)
        features = prediction.features[:, : mask.shape[1]]
        feature = feature_loss(features, hidden_states[:, shift:], mask)
        cross_entropy = soft_cross_entropy(lm_head(features), target_probs[:, shift:], mask)
        terms[f"{prediction.name}_feature"], terms[f"{prediction.name}_ce"] = feature.detach(), cross_entropy.detach()
        loss = loss + prediction.feature_weight * feature + prediction.cross_entropy_weight * cross_entropy
    return loss, terms


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask = mask.to(values)
    return (values * mask).sum() / mask.sum().clamp(min=1)
