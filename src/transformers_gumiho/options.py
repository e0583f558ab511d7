"""Fields of the dataclasses whose options a command takes."""

from dataclasses import MISSING, field
from typing import Any


REQUIRED = MISSING


def option(text: str, default: Any = None) -> Any:
    """Returns a field with this help text. A list is copied; an option whose default is `REQUIRED` must be given."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": text})
    return field(default=default, metadata={"help": text})
