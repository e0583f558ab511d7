"""The command `gumiho`, run in this process."""

import io
import re
import sys
from contextlib import redirect_stdout
from typing import Any

import pytest

from transformers_gumiho_cli import main


def gumiho(*words: object) -> str:
    """Runs `gumiho` with these words; returns what it writes to the standard output, where it stands afterwards."""
    written = io.StringIO()
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(written):
            patch.setattr(sys, "argv", ["gumiho", *map(str, words)])
            main()
    finally:
        sys.stdout.write(written.getvalue())
    return written.getvalue()


def refuse(message: str, *words: object) -> None:
    """Asserts that `gumiho` ends with one line that holds this message."""
    with pytest.raises(SystemExit, match=re.escape(message)):
        gumiho(*words)


def interrupt(owner: Any, name: str, num_calls: int, *words: object) -> None:
    """Asserts that `gumiho` ends as Ctrl+C ends it. A function of `owner` presses it after this number of calls."""
    real, calls = getattr(owner, name), []

    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > num_calls:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, run)
        with pytest.raises(SystemExit, match="130"):
            gumiho(*words)
