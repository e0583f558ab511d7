"""The command `gumiho`, run in this process."""

import re
import sys

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
