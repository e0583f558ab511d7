"""Showing people what a drafter does: answers whose accepted drafts are coloured, and draft trees."""

from .answering import Answer, stream_answer
from .arguments import GenerateArguments, ShowArguments
from .command import generate, show
from .cycles import Cycle, watch_cycles
from .labels import CycleLabels, label_cycle
from .streaming import CycleStreamer
from .terminal_tree import draw_in_terminal


__all__ = [
    "Answer",
    "Cycle",
    "CycleLabels",
    "CycleStreamer",
    "GenerateArguments",
    "ShowArguments",
    "draw_in_terminal",
    "generate",
    "label_cycle",
    "show",
    "stream_answer",
    "watch_cycles",
]
