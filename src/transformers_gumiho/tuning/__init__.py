"""Fitting a drafter's trees to a machine."""

from .acceptance import AcceptanceProfile, profile_acceptance
from .answers import Answer, decode_answers
from .arguments import TuningArguments
from .calibration import DraftLosses, measure_draft_losses
from .command import tune
from .contest import measure_in_turns
from .costs import CycleCosts, measure_costs
from .finding import find_best_tree
from .result import TuningResult, describe
from .search import Candidate, TreeSettings, choose_contenders, rank_trees


__all__ = [
    "AcceptanceProfile",
    "Answer",
    "Candidate",
    "CycleCosts",
    "DraftLosses",
    "TreeSettings",
    "TuningArguments",
    "TuningResult",
    "choose_contenders",
    "decode_answers",
    "describe",
    "find_best_tree",
    "measure_costs",
    "measure_draft_losses",
    "measure_in_turns",
    "profile_acceptance",
    "rank_trees",
    "tune",
]
