"""The terms of a drafter's loss: one function each, all of one signature, and the table that names them.

To add a term, write its function here, and give it a name in [`TERMS`] and a weight in `LossWeights.of_terms`. It then
takes part in training and in evaluations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F


LMHead = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Readout:
    """
    States, and what the output head reads from them; it runs when that is first asked for.

    Attributes:
        states (`(..., H)`): The target's last hidden states, or the drafter's features that predict them.
        lm_head: The function from states to logits `(..., V)`.
    """

    states: torch.Tensor
    lm_head: LMHead

    @classmethod
    def of_target(cls, states: torch.Tensor, lm_head: LMHead) -> "Readout":
        """Returns what is to be predicted: no gradient goes into it."""
        return cls(states.detach(), torch.no_grad()(lambda rows: lm_head(rows)))

    @cached_property
    def logits(self) -> torch.Tensor:
        """The logits `(..., V)`, in float32."""
        return self.lm_head(self.states).float()

    @cached_property
    def probs(self) -> torch.Tensor:
        """The distribution `(..., V)`, in float32. It is kept without the logits, which are as large."""
        return self.lm_head(self.states).float().softmax(dim=-1)


# (prediction, target, weights): what the drafter predicted at some positions, what it should have, and the weight of
# each position, `(...)`, 0 where it does not count. Returns the weighted loss of each, `(...)` in float32.
Term = Callable[[Readout, Readout, torch.Tensor], torch.Tensor]


def smooth_l1(prediction: Readout, target: Readout, weights: torch.Tensor) -> torch.Tensor:
    """Returns the smooth-L1 distance of each feature to its state, averaged over `H`, times its weight."""
    distances = F.smooth_l1_loss(prediction.states.float(), target.states.float(), reduction="none")
    return distances.mean(dim=-1) * weights


def soft_cross_entropy(prediction: Readout, target: Readout, weights: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy (nats) of each prediction to the target's distribution, times its weight."""
    logits = prediction.logits
    # As the probabilities sum to 1: -sum(p log softmax(z)) = logsumexp(z) - p z, which holds no second `(..., V)`.
    return (logits.logsumexp(dim=-1) - (target.probs * logits).sum(dim=-1)) * weights


# The names are those of the logs: `serial_feature`, `parallel_0_ce`.
TERMS: dict[str, Term] = {"feature": smooth_l1, "ce": soft_cross_entropy}
