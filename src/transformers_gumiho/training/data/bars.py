"""Progress bars, which are lines where they go into a file."""

import sys
from typing import Any

from tqdm import tqdm


_SECONDS = 60  # between two lines of a file
_COLUMNS = 90
_CONTROLS = "\r\n \x1b[A"  # with which a bar moves in a terminal


class _Lines:
    """Standard error for a bar: each state of it is a line."""

    def write(self, text: str) -> None:
        if line := text.strip(_CONTROLS):
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(**settings: Any) -> Any:
    """Returns a `tqdm` on standard error with these settings. In a file, it writes a line each minute."""
    if not sys.stderr.isatty():
        settings |= {"file": _Lines(), "mininterval": _SECONDS, "maxinterval": _SECONDS, "ncols": _COLUMNS}
    return tqdm(**settings)
