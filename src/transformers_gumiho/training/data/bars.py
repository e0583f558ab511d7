"""Progress bars, which are lines where they go into a file, and lines of a width that terminals have."""

import sys
import textwrap
from typing import Any

from tqdm import tqdm


_SECONDS = 60  # between two lines of a file
_BAR, _LINE = 90, 100  # columns
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
        settings |= {"file": _Lines(), "mininterval": _SECONDS, "maxinterval": _SECONDS, "ncols": _BAR}
    return tqdm(**settings)


def without_other_bars() -> None:
    """Keeps the bars of `datasets`, which move in a terminal, out of a file."""
    if not sys.stderr.isatty():
        import datasets

        datasets.disable_progress_bars()


def write_lines(text: str) -> None:
    """Writes a text to the standard output, beside a bar. A line that is no row of a table fits 100 columns."""
    for line in text.split("\n"):
        if len(line) > _LINE and not line.startswith("|"):
            line = textwrap.fill(line, _LINE, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        tqdm.write(line)
    sys.stdout.flush()
