"""Showing people what a drafter does: answers whose accepted drafts are colored, draft trees, and a web page."""

from .answering import Answer, stream_answer
from .arguments import DemoArguments, GenerateArguments, ShowArguments
from .command import generate, show
from .cycles import Cycle, watch_cycles
from .labels import CycleLabels, label_cycle
from .streaming import CycleStreamer
from .terminal_tree import draw_in_terminal
from .web.command import demo, make_page


__all__ = [
    "Answer",
    "Cycle",
    "CycleLabels",
    "CycleStreamer",
    "DemoArguments",
    "GenerateArguments",
    "ShowArguments",
    "demo",
    "draw_in_terminal",
    "generate",
    "label_cycle",
    "make_page",
    "show",
    "stream_answer",
    "watch_cycles",
]
