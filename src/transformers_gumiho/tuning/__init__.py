"""Fitting a drafter's trees to a machine."""

from .acceptance import AcceptanceProfile, profile_acceptance
from .command import TuningArguments, TuningResult, describe, find_best_tree, tune
from .costs import CycleCosts, measure_costs
from .search import Candidate, TreeSettings, rank_trees


__all__ = [
    "AcceptanceProfile",
    "Candidate",
    "CycleCosts",
    "TreeSettings",
    "TuningArguments",
    "TuningResult",
    "describe",
    "find_best_tree",
    "measure_costs",
    "profile_acceptance",
    "rank_trees",
    "tune",
]
