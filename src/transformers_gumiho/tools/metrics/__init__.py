"""The acceptance length, as a function and for `evaluate.load`."""

from pathlib import Path

from .acceptance import AcceptanceStatistics, acceptance_statistics


# `evaluate.load(ACCEPTANCE_LENGTH)`
ACCEPTANCE_LENGTH = str(Path(__file__).with_name("acceptance_length.py"))

__all__ = ["ACCEPTANCE_LENGTH", "AcceptanceStatistics", "acceptance_statistics"]
