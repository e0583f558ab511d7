"""Compares ways of decoding on one machine."""

from ..measuring.modes import DecodingMode
from ..measuring.prompts import Question, read_prompts
from .command import BenchmarkArguments, benchmark
from .modes import decoding_modes
from .runner import BenchmarkSettings, run_benchmark
from .sample import Sample
from .summary import SummaryRow, summarize


__all__ = [
    "BenchmarkArguments",
    "BenchmarkSettings",
    "DecodingMode",
    "Question",
    "Sample",
    "SummaryRow",
    "benchmark",
    "decoding_modes",
    "read_prompts",
    "run_benchmark",
    "summarize",
]
