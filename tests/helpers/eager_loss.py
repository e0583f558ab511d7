"""The loss of a drafter in plain eager form, with the logits of all positions: the oracle of the chunked one."""

import torch

from transformers_gumiho.model.outputs import GumihoOutput
from transformers_gumiho.training.losses.positions import select_positions
from transformers_gumiho.training.losses.predictors import LossWeights, predictions_of
from transformers_gumiho.training.losses.terms import LMHead, Readout, smooth_l1


def soft_cross_entropy(prediction: Readout, target: Readout) -> torch.Tensor:
    """The cross-entropy as autograd differentiates it."""
    return -(target.probs * prediction.logits.log_softmax(dim=-1)).sum(dim=-1)


TERMS = {"feature": smooth_l1, "ce": soft_cross_entropy}


def gumiho_loss(
    output: GumihoOutput,
    hidden_states: torch.Tensor,
    lm_head: LMHead,
    loss_mask: torch.Tensor,
    weights: LossWeights | None = None,
    position_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Computes what `chunked_gumiho_loss` computes for a whole batch; its arguments have the same meaning."""
    predictions = predictions_of(output, weights or LossWeights())
    selected = select_positions(predictions, hidden_states, loss_mask, position_ids)
    target = Readout(selected.targets, lm_head)
    loss = hidden_states.new_zeros((), dtype=torch.float32)
    terms: dict[str, torch.Tensor] = {}
    for (predictor, _), features, valid in zip(predictions, selected.features, selected.valid, strict=True):
        prediction = Readout(features, lm_head)
        for name, weight in predictor.weights.items():
            mean = (TERMS[name](prediction, target) * valid).sum() / valid.sum().clamp(min=1)
            terms[f"{predictor.name}_{name}"] = mean.detach()
            loss = loss + weight * mean
    return loss, terms
