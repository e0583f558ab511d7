"""Terms whose gradient is written out, because it was measured to pay; the eager ones of `TERMS` are their oracle."""

from typing import Any

import torch

from .terms import Readout, Term


def soft_cross_entropy(prediction: Readout, target: Readout, weights: torch.Tensor) -> torch.Tensor:
    """As the eager term, with one tensor of the logits' size where autograd keeps and makes several."""
    return _SoftCrossEntropy.apply(prediction.logits, target.probs) * weights


CLOSED_FORMS: dict[str, Term] = {"ce": soft_cross_entropy}


class _SoftCrossEntropy(torch.autograd.Function):
    """Soft cross-entropies `(n,)` of float32 logits `(n, V)`; their gradient is `softmax(logits) - target_probs`."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
        expected_logits = (target_probs * logits).sum(dim=-1)
        probs = logits.softmax(dim=-1)
        # The softmax of the largest logit is exp(largest - log_normalizer), and never small.
        log_normalizers = logits.amax(dim=-1) - probs.amax(dim=-1).log()
        ctx.save_for_backward(probs.sub_(target_probs))
        return log_normalizers - expected_logits

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        # In place: each term's own part of the graph is walked once.
        return gradient.mul_(grad_outputs[0][:, None]), None
