"""Colors in a terminal, where they are wanted."""

import os
from typing import TextIO


_GREEN, _RESET = "\033[32m", "\033[0m"


def wants_colors(choice: str, stream: TextIO) -> bool:
    """
    Returns whether to write colors to `stream`.

    Args:
        choice: `"always"`, `"never"`, or `"auto"`: to a terminal that knows colors, unless `NO_COLOR` is set (see
            https://no-color.org).
        stream: Where the text goes.
    """
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colored(text: str, wanted: bool = True) -> str:
    """Returns `text` in the color of accepted drafts."""
    return f"{_GREEN}{text}{_RESET}" if wanted and text else text
