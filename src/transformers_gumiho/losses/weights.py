"""The weights of the loss terms."""

from dataclasses import dataclass


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
