"""Choosing the trees that should decode fastest."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .acceptance import AcceptanceProfile
from .costs import CycleCosts, tree_capacity


# One for all depths, or one for each.
DraftTemperature = float | tuple[float, ...]


@dataclass(frozen=True)
class TreeSettings:
    """The decoding settings of a drafter that are tuned; their meanings are those in [`DraftingSettings`]."""

    num_assistant_tokens: int
    branching_factor: int
    tree_depth: int
    draft_temperature: DraftTemperature

    def as_dict(self) -> dict[str, Any]:
        """Returns them as the fields of a generation config, in numbers and lists."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


@dataclass(frozen=True)
class Candidate:
    """
    A tree and what is expected of it.

    Attributes:
        settings: The tree.
        tau: Expected tokens per cycle.
        cycle_seconds: Expected time of a cycle.
        setup_seconds: What a text costs before its first cycle, for each of its tokens.
    """

    settings: TreeSettings
    tau: float
    cycle_seconds: float
    setup_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Expected speed, prompt aside."""
        return 1 / (self.cycle_seconds / self.tau + self.setup_seconds)


def rank_trees(
    profiles: dict[tuple[int, DraftTemperature], AcceptanceProfile],
    costs: CycleCosts,
    sizes: Iterable[int],
    num_serial_tokens: int,
    max_depth: int,
    text_length: float = math.inf,
) -> list[Candidate]:
    """
    Returns every tree with what is expected of it, the fastest first.

    Args:
        profiles: By branching factor and draft temperature.
        costs: What cycles cost on this machine.
        sizes: Numbers of drafted tokens to consider.
        num_serial_tokens: Of the drafter.
        max_depth: Of the drafter's trees.
        text_length: New tokens of a text after the first, over which its setup spreads.
    """
    candidates = []
    for (factor, temperature), profile in profiles.items():
        for depth in range(1, max_depth + 1):
            for size in sizes:
                if depth > size or size > tree_capacity(factor, depth, num_serial_tokens):
                    continue
                settings = TreeSettings(size, factor, depth, temperature)
                seconds = costs.cycle_seconds(size, factor, depth)
                candidates.append(Candidate(settings, profile.tau(size, depth), seconds, costs.setup / text_length))
    return sorted(candidates, key=lambda candidate: -candidate.tokens_per_second)


def choose_contenders(ranked: Sequence[Candidate], count: int) -> list[Candidate]:
    """
    Returns the first `count` of ranked trees of which no two are alike: they differ in their branching factor, or in
    size by the next power of two. Trees that are alike cost the same, and of them the one that is accepted furthest,
    which does not depend on the machine, is the first already.
    """
    found: dict[tuple[int, int], Candidate] = {}
    for candidate in ranked:
        tree = candidate.settings
        found.setdefault((tree.branching_factor, tree.num_assistant_tokens.bit_length()), candidate)
    return list(found.values())[:count]
