"""Training losses of a Gumiho drafter, in plain eager form.

`B` batch size, `L` tokens of text, `H` hidden size, `V` vocabulary, `S` serial tokens, `P` parallel heads. The text
is `x_0 .. x_{L-1}` and `h_k` the target's last hidden state at `x_k`. The drafter reads tokens `x_1 ..` and states
`h_0 ..`; at position t its serial feature predicts `h_{t+1}` and parallel head i predicts `h_{t+1+S+i}`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

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
    """

    feature: float = 1.0
    serial_cross_entropy: float = 0.1
    parallel_cross_entropy: float = 0.1
    decay: float = 0.8
    parallel: float = 1 / 9


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
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """
    Computes the loss of a drafter on a batch of text.

    Args:
        output: The drafter's output for tokens `x_1 ..` and states `.. h_{L-2}`.
        hidden_states (`(B, L, H)`): The target's last hidden states of the whole text.
        lm_head: The target's output head.
        loss_mask (`(B, L)`): 1 at the states that count as targets.
        weights: See [`LossWeights`].

    Returns:
        The loss and its unweighted terms: `serial_feature`, `serial_ce`, `parallel_feature_i` and `parallel_ce_i`.
    """
    serial_features, parallel_features = output.serial_features, output.parallel_features
    if serial_features is None or parallel_features is None:
        raise ValueError("The loss needs the features of both the serial and the parallel heads.")
    weights = weights or LossWeights()
    with torch.no_grad():
        target_probs = lm_head(hidden_states).float().softmax(dim=-1)
    terms: dict[str, torch.Tensor] = {}

    def pair(features: torch.Tensor, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask = loss_mask[:, shift:]
        features = features[:, : mask.shape[1]]
        return (
            feature_loss(features, hidden_states[:, shift:], mask),
            soft_cross_entropy(lm_head(features), target_probs[:, shift:], mask),
        )

    terms["serial_feature"], terms["serial_ce"] = pair(serial_features, 1)
    loss = weights.feature * terms["serial_feature"] + weights.serial_cross_entropy * terms["serial_ce"]
    num_heads, num_paths = parallel_features.shape[1:3]
    num_serial_tokens = serial_features.shape[1] - num_paths
    for head in range(num_heads):
        feature, cross_entropy = pair(parallel_features[:, head], 1 + num_serial_tokens + head)
        terms[f"parallel_feature_{head}"], terms[f"parallel_ce_{head}"] = feature, cross_entropy
        weight = weights.parallel * weights.decay ** (head + 1)
        loss = loss + weight * (weights.feature * feature + weights.parallel_cross_entropy * cross_entropy)
    return loss, {name: term.detach() for name, term in terms.items()}


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask = mask.to(values)
    return (values * mask).sum() / mask.sum().clamp(min=1)
