"""Finds the settings with which a drafter is fastest on a machine."""

from .command import TuningArguments, tune
from .contest import Standing, TuningResult, describe
from .trees import Tree


__all__ = ["Standing", "Tree", "TuningArguments", "TuningResult", "describe", "tune"]
