"""Shows what a drafter does: answers with their accepted drafts, draft trees, and a web page."""

from .answer_svg import show_answer
from .answering import Answer, stream_answer
from .arguments import DemoArguments, GenerateArguments, ShowArguments
from .command import demo, generate, make_page, show
from .cycles import Cycle, watch_cycles


__all__ = [
    "Answer",
    "Cycle",
    "DemoArguments",
    "GenerateArguments",
    "ShowArguments",
    "demo",
    "generate",
    "make_page",
    "show",
    "show_answer",
    "stream_answer",
    "watch_cycles",
]
