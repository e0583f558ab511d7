"""The loss of a drafter in plain eager form, which holds the logits of all positions."""

import torch

from ..model.outputs import GumihoOutput
from .positions import select_positions
from .predictors import predictions_of
from .terms import TERMS, LMHead, Readout
from .weights import LossWeights


def gumiho_loss(
    output: GumihoOutput,
    hidden_states: torch.Tensor,
    lm_head: LMHead,
    loss_mask: torch.Tensor,
    weights: LossWeights | None = None,
    position_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """
    Computes the loss of a drafter on a batch of text: the sum over its predictors of `w_f * smooth_l1(f, h)` and
    `w_ce * cross_entropy(lm_head(f), lm_head(h))`, for the feature f that predicts state h. Source: arXiv 2503.10135,
    with the weights and shifts of the published training code.

    `B` batch size, `L` tokens of text, `H` hidden size, `V` vocabulary.

    Args:
        output: The drafter's output for tokens `x_1 ..` and states `.. h_{L-2}`.
        hidden_states (`(B, L, H)`): The target's last hidden states of the text.
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
    predictions = predictions_of(output, weights or LossWeights())
    selected = select_positions(predictions, hidden_states, loss_mask, position_ids)
    target = Readout.of_target(selected.targets, lm_head)
    loss = hidden_states.new_zeros((), dtype=torch.float32)
    terms: dict[str, torch.Tensor] = {}
    for (predictor, _), features, valid in zip(predictions, selected.features, selected.valid, strict=True):
        prediction = Readout(features, lm_head)
        for name, weight in predictor.weights.items():
            mean = TERMS[name](prediction, target, valid.float()).sum() / valid.sum().clamp(min=1)
            terms[f"{predictor.name}_{name}"] = mean.detach()
            loss = loss + weight * mean
    return loss, terms
