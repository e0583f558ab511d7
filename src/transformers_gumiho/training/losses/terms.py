"""The terms of a drafter's loss: one function each, all of one signature, and the table that names them.

To add a term, write its function here, and give it a name in [`TERMS`] and a weight in `LossWeights.of_terms`. It then
takes part in training and in evaluations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F


LMHead = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Readout:
    """States, and what the output head reads from them; it runs when that is first asked for."""

    states: torch.Tensor  # (..., H): the target's last hidden states, or the drafter's features that predict them
    lm_head: LMHead  # from states to logits (..., V)

    @cached_property
    def logits(self) -> torch.Tensor:
        """The logits `(..., V)`, in float32."""
        return self.lm_head(self.states).float()

    @cached_property
    def probs(self) -> torch.Tensor:
        """The target's distribution `(..., V)`, in float32. No gradient goes into it, and no logits are kept."""
        with torch.no_grad():
            return self.lm_head(self.states).float().softmax(dim=-1)


# (prediction, target): what the drafter predicted at some positions, and what it should have. Returns the loss of each
# position, `(...)` in float32.
Term = Callable[[Readout, Readout], torch.Tensor]


def smooth_l1(prediction: Readout, target: Readout) -> torch.Tensor:
    """Returns the smooth-L1 distance of each feature to its state, averaged over `H`."""
    return F.smooth_l1_loss(prediction.states.float(), target.states.float(), reduction="none").mean(dim=-1)


def soft_cross_entropy(prediction: Readout, target: Readout) -> torch.Tensor:
    """Returns the cross-entropy (nats) of each prediction to the target's distribution."""
    return _SoftCrossEntropy.apply(prediction.logits, target.probs)


# The names are those of the logs: `serial_feature`, `parallel_0_ce`.
TERMS: dict[str, Term] = {"feature": smooth_l1, "ce": soft_cross_entropy}


class _SoftCrossEntropy(torch.autograd.Function):
    """
    Soft cross-entropies `(n,)` of float32 logits `(n, V)`. Their gradient is `softmax(logits) - target_probs`: written
    out, it takes one tensor of the logits' size where autograd keeps and makes several.
    """

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
