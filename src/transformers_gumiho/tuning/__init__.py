"""Fitting a drafter's settings to a machine."""

from .acceptance import AcceptanceProfile, profile_acceptance
from .answers import Answer, decode_answers
from .arguments import TuningArguments
from .calibration import DraftLosses, measure_draft_losses
from .command import tune
from .contest import decode_in_turns, measure_in_turns
from .cost_table import measure_cost_table
from .costs import CycleCosts, measure_costs, measure_cycles
from .counting import rank_on_other_half, rank_tokens
from .finding import find_best_tree
from .reliability import fit_acceptance_curves, measure_acceptance_curves
from .result import TuningResult, describe
from .search import Candidate, TreeSettings, choose_contenders, rank_trees
from .sizes import FittedSizes, fit_sizes
from .vocabulary import VocabularyCandidate, VocabularyChoice, choose_vocabulary


__all__ = [
    "AcceptanceProfile",
    "Answer",
    "Candidate",
    "CycleCosts",
    "DraftLosses",
    "FittedSizes",
    "TreeSettings",
    "TuningArguments",
    "TuningResult",
    "VocabularyCandidate",
    "VocabularyChoice",
    "choose_contenders",
    "choose_vocabulary",
    "decode_answers",
    "decode_in_turns",
    "describe",
    "find_best_tree",
    "fit_acceptance_curves",
    "fit_sizes",
    "measure_acceptance_curves",
    "measure_cost_table",
    "measure_costs",
    "measure_cycles",
    "measure_draft_losses",
    "measure_in_turns",
    "profile_acceptance",
    "rank_on_other_half",
    "rank_tokens",
    "rank_trees",
    "tune",
]
