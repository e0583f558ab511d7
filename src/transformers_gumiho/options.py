"""Options of commands: the fields of their dataclasses, and how `gumiho COMMAND --help` shows them."""

from argparse import Action, ArgumentDefaultsHelpFormatter
from dataclasses import MISSING, field
from typing import Any


REQUIRED = MISSING


def option(text: str, default: Any = None) -> Any:
    """Returns a field with this help text. A list is copied; an option whose default is `REQUIRED` must be given."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": text})
    return field(default=default, metadata={"help": text})


class HelpFormatter(ArgumentDefaultsHelpFormatter):
    """Shows each default once; an option that turns another one off names it."""

    def _get_help_string(self, action: Action) -> str | None:
        name = action.option_strings[0] if action.option_strings else ""
        if name.startswith("--no_"):
            return f"Turns --{name.removeprefix('--no_')} off."
        is_shown = action.default in (None, []) or "(default: " in (action.help or "")
        return action.help if is_shown else super()._get_help_string(action)
