"""Compares ways of decoding on one machine."""

from ..measuring.prompts import Question, read_prompts
from ..measuring.timing import DecodingMode
from .command import BenchmarkArguments, benchmark
from .modes import decoding_modes
from .runner import run_benchmark
from .summary import Sample, SummaryRow, summarize


__all__ = [
    "BenchmarkArguments",
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
