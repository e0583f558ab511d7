"""How often drafted tokens are accepted, by what the drafter thinks of them and by how deep in the tree they are."""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch


@dataclass(frozen=True)
class AcceptanceCurve:
    """
    How often drafted tokens were accepted, by the score of their path.

    Attributes:
        scores: Log-probabilities (nats) of paths, increasing.
        shares: Of the tokens with about this score, those that were accepted: above 0, never decreasing, at most 1.
    """

    scores: tuple[float, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.scores or len(self.scores) != len(self.shares):
            raise ValueError(
                f"an acceptance curve must have a share for each score, got {len(self.scores)} scores and "
                f"{len(self.shares)} shares"
            )
        if any(a >= b for a, b in pairwise(self.scores)):
            raise ValueError("the `scores` of an acceptance curve must increase")
        if any(a > b for a, b in pairwise(self.shares)):
            raise ValueError("the `shares` of an acceptance curve must never decrease")


@dataclass(frozen=True)
class AcceptanceCurves:
    """
    A curve for each depth. Of two paths with the same score the deeper one has passed through tokens that the drafter
    was surer of, and how far that may be trusted differs from drafter to drafter and from head to head.

    Attributes:
        by_depth: The curves of tokens at depth 1, 2, ...; the last one counts for all deeper ones, too.
    """

    by_depth: tuple[AcceptanceCurve, ...]

    def log_probabilities(self, scores: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        """
        Returns how likely tokens are to be accepted (nats): what lies between the points of the curve of their depth,
        and below the first of them as much less as the drafter says.

        Args:
            scores (`(B, N)`): Of their paths (nats).
            depths (`(B, N)`): 1 and more.
        """
        points, values = _in_a_grid(self.by_depth, scores.device, scores.dtype)
        curves = depths.clamp(max=len(self.by_depth)) - 1
        first = points[:, 0][curves]
        inside = scores.maximum(first)  # a score may be minus infinity, and a point infinity
        right = (inside[..., None] > points[curves]).sum(dim=-1).clamp(1, points.shape[1] - 1)
        left_points, right_points = points[curves, right - 1], points[curves, right]
        # Points may be closer than the scores' precision tells.
        width = (right_points - left_points).clamp(min=torch.finfo(scores.dtype).tiny)
        weights = ((inside - left_points) / width).clamp(0.0, 1.0)
        between = torch.lerp(values[curves, right - 1], values[curves, right], weights)
        return between + (scores - first).clamp(max=0.0)


@lru_cache(maxsize=16)
def _in_a_grid(
    curves: tuple[AcceptanceCurve, ...], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the scores and the logarithms of the shares `(D, P)`, kept as every cycle asks for them. Curves of fewer
    points go on as they end, up to infinity.
    """
    width = max(2, *(len(curve.scores) for curve in curves))
    points = [[*curve.scores, *[math.inf] * (width - len(curve.scores))] for curve in curves]
    shares = [[*curve.shares, *curve.shares[-1:] * (width - len(curve.shares))] for curve in curves]
    values = [[math.log(share) for share in of_curve] for of_curve in shares]
    return torch.tensor(points, device=device, dtype=dtype), torch.tensor(values, device=device, dtype=dtype)


__all__ = ["AcceptanceCurve", "AcceptanceCurves"]
