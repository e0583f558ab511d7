"""The predictors of a drafter, what each predicts, and how much each of its loss terms counts.

The text is `x_0 .. x_{L-1}` and `h_k` the target's last hidden state at `x_k`. The drafter reads tokens `x_1 ..` and
states `h_0 ..`. With `S` serial tokens its serial feature at position t predicts `h_{t+1}` and parallel head i
predicts `h_{t+1+S+i}`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...commands import UserValueError
from ...model.outputs import GumihoOutput


@dataclass(frozen=True)
class LossWeights:
    """
    Weights of the loss terms; the defaults are the published recipe's (arXiv 2503.10135).

    Attributes:
        feature: Of the smooth-L1 term between features and hidden states; `None` where features predict none.
        serial_cross_entropy: Of the soft cross-entropy of the serial head.
        parallel_cross_entropy: Of the soft cross-entropy of the parallel heads. The recipe holds it at zero for two of
            twenty epochs.
        decay: Parallel head i counts `decay ** (i + 1)`.
        serial: Of the serial head, and of each serial token that was drafted from the drafter's own feature. The
            recipe has none of the latter; they are there where the drafter's forward pass was asked to `unroll`.
        parallel: Of the sum over all parallel heads.
    """

    feature: float | None = 1.0
    serial_cross_entropy: float = 0.1
    parallel_cross_entropy: float = 0.1
    decay: float = 0.8
    serial: float = 1.0
    parallel: float = 1 / 9

    def of_terms(self, cross_entropy: float, factor: float) -> dict[str, float]:
        """Returns the weight of each term of a predictor whose `cross_entropy` has this weight, times `factor`."""
        terms = {} if self.feature is None else {"feature": factor * self.feature}
        return terms | {"ce": factor * cross_entropy}


@dataclass(frozen=True)
class Predictor:
    """One predictor of the drafter: the serial head, an unrolled step of it, or a parallel head."""

    name: str  # `serial`, `unrolled_j` or `parallel_i`
    shift: int  # its feature at position t predicts the target's state `t + shift`
    weights: Mapping[str, float]  # of its terms in the loss, by name


def predictors(
    num_serial_tokens: int, num_parallel_heads: int, num_unrolled: int, weights: LossWeights
) -> list[Predictor]:
    """
    Returns the predictors of a drafter. Where the serial head is unrolled as in drafting, for `num_serial_tokens - 1`
    steps, the q-th of them makes the draft at position q + 1.
    """
    serial = weights.of_terms(weights.serial_cross_entropy, weights.serial)
    found = [Predictor("serial", 1, serial)]
    found += [Predictor(f"unrolled_{step}", 1 + step, serial) for step in range(1, num_unrolled + 1)]
    for head in range(num_parallel_heads):
        terms = weights.of_terms(weights.parallel_cross_entropy, weights.parallel * weights.decay ** (head + 1))
        found.append(Predictor(f"parallel_{head}", 1 + num_serial_tokens + head, terms))
    return found


def predictions_of(output: GumihoOutput, weights: LossWeights) -> list[tuple[Predictor, torch.Tensor]]:
    """Returns each predictor of a drafter's output with its features `(B, T', H)`, in the order of [`predictors`]."""
    serial, parallel = output.serial_features, output.parallel_features
    if serial is None or parallel is None:
        raise UserValueError("The loss needs the features of both the serial and the parallel heads.")
    unrolled = output.unrolled_features or ()
    # In a text without a single path every count does: no head has a position.
    num_serial_tokens = serial.shape[1] - parallel.shape[2]
    found = predictors(num_serial_tokens, parallel.shape[1], len(unrolled), weights)
    return list(zip(found, (serial, *unrolled, *parallel.unbind(dim=1)), strict=True))
