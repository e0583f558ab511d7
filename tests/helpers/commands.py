"""The command `gumiho`, run in this process."""

import re
import sys
from typing import Any

import pytest

from transformers_gumiho import cli


def gumiho(*words: object) -> None:
    """Runs `gumiho` with these words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gumiho", *map(str, words)])
        cli.main()


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
