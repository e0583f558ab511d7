"""`gumiho demo`."""

from typing import TYPE_CHECKING

from transformers import logging

from ...pairs import load_pair
from ..arguments import DemoArguments


if TYPE_CHECKING:
    import gradio

    from .page import Page


def demo(args: DemoArguments) -> None:
    """
    Opens a web page that answers a question twice, side by side: plainly and with the drafter. It highlights accepted
    drafts, counts tau and the speed, and draws the newest draft tree. Ctrl-C ends it.

    Raises:
        ImportError: Gradio is not installed.
        OSError: The pair cannot be downloaded, or the port is taken.
        ValueError: The options do not name a pair.
    """
    page = _load_page(args)
    try:
        page.build(args.max_visitors).launch(server_name=args.host, server_port=args.port, ssr_mode=False)
    finally:
        page.lock.is_closed = True


def make_page(args: DemoArguments) -> "gradio.Blocks":
    """
    Returns the page of `gumiho demo`, for a Space or a program of yours; `launch()` opens it.

    Raises:
        ImportError: Gradio is not installed.
        OSError: The pair cannot be downloaded.
        ValueError: The options do not name a pair, or a limit is below 1.
    """
    return _load_page(args).build(args.max_visitors)


def _load_page(args: DemoArguments) -> "Page":
    for name in ("max_new_tokens", "max_question_tokens", "max_visitors"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}.")
    # Only the page needs Gradio; whoever lacks it should not wait for the models first.
    from .page import Page

    logging.disable_progress_bar()
    return Page(*load_pair(args), args.max_new_tokens, args.max_question_tokens)
