"""The weights of the loss terms."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .terms import TERMS


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
        serial: Of the serial head.
        parallel: Of the sum over all parallel heads.
        unrolled: Of each serial token beyond the first that was drafted from the drafter's own feature. The recipe
            has none; they are there where the drafter's forward pass was asked to `unroll`.
        reach: Where given, how much each draft position counts from the first on, in place of `decay` and `parallel`:
            how often decoding reaches it. Those below the last one count like it.
        further: Of other terms, by their names in `TERMS`; the same for the serial and for the parallel heads.

    Raises:
        ValueError: A further term has no such name, or a weight of its own above.
    """

    feature: float = 1.0
    serial_cross_entropy: float = 0.1
    parallel_cross_entropy: float = 0.1
    decay: float = 0.8
    serial: float = 1.0
    parallel: float = 1 / 9
    unrolled: float = 1.0
    reach: tuple[float, ...] | None = None
    further: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        possible = set(TERMS) - {"feature", "ce"}
        if unknown := set(self.further) - possible:
            raise ValueError(
                f"There is no further loss term {', '.join(map(repr, sorted(unknown)))}, only "
                f"{', '.join(map(repr, sorted(possible))) or 'none'}; smooth L1 and cross-entropy have weights of "
                f"their own. Add it to `transformers_gumiho.losses.terms.TERMS`, or leave its weight out."
            )

    def reach_of(self, depth: int, default: float) -> float:
        """Returns the weight of draft position `depth` (from 1 on) by `reach`, and `default` without it."""
        return default if self.reach is None else self.reach[min(depth, len(self.reach)) - 1]

    def of_terms(self, cross_entropy: float, factor: float = 1.0) -> dict[str, float]:
        """Returns the weight of each term of a predictor whose `cross_entropy` has this weight, times `factor`."""
        weights = {"feature": self.feature, "ce": cross_entropy, **self.further}
        return {name: factor * weight for name, weight in weights.items()}
