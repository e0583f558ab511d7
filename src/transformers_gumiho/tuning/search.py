"""Choosing the tree that decodes fastest."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from .acceptance import AcceptanceProfile
from .costs import CycleCosts, tree_capacity


@dataclass(frozen=True)
class TreeSettings:
    """Decoding settings of a drafter; see [`DraftingSettings`]."""

    num_assistant_tokens: int
    branching_factor: int
    tree_depth: int
    draft_temperature: float

    def as_dict(self) -> dict[str, float]:
        """Returns them as the fields of a generation config."""
        return asdict(self)


@dataclass(frozen=True)
class Candidate:
    """
    A tree and what is expected of it.

    Attributes:
        settings: The tree.
        tau: Expected tokens per cycle.
        cycle_seconds: Expected time of a cycle.
    """

    settings: TreeSettings
    tau: float
    cycle_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Expected speed, prompt aside."""
        return self.tau / self.cycle_seconds


def rank_trees(
    profiles: dict[tuple[int, float], AcceptanceProfile],
    costs: CycleCosts,
    sizes: Iterable[int],
    num_serial_tokens: int,
    max_depth: int,
) -> list[Candidate]:
    """
    Returns every tree with what is expected of it, the fastest first.

    Args:
        profiles: By branching factor and draft temperature.
        costs: What cycles cost on this machine.
        sizes: Numbers of drafted tokens to consider.
        num_serial_tokens: Of the drafter.
        max_depth: Of the drafter's trees.
    """
    candidates = []
    for (factor, temperature), profile in profiles.items():
        for depth in range(1, max_depth + 1):
            for size in sizes:
                if size > tree_capacity(factor, depth, num_serial_tokens):
                    continue
                settings = TreeSettings(size, factor, depth, temperature)
                seconds = costs.cycle_seconds(size, factor, depth)
                candidates.append(Candidate(settings, profile.tau(size, depth), seconds))
    return sorted(candidates, key=lambda candidate: -candidate.tokens_per_second)
