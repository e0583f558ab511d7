"""Metrics for `evaluate.load`."""

from pathlib import Path


# `evaluate.load(ACCEPTANCE_LENGTH)`
ACCEPTANCE_LENGTH = str(Path(__file__).with_name("acceptance_length.py"))

__all__ = ["ACCEPTANCE_LENGTH"]
