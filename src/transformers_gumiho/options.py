"""Options of commands: the fields of their dataclasses, and how `gumiho COMMAND --help` shows them."""

from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from .user_errors import as_user_errors


REQUIRED = MISSING
_WIDEST_NAME = 36
# What an option takes, by the function that reads it; `BOOL` is true or false.
_VALUES = {int: "N", float: "X", string_to_bool: "BOOL", Path: "FILE"}


def option(text: str, default: Any = None) -> Any:
    """Returns a field with this help text. A list is copied; an option whose default is `REQUIRED` must be given."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": text})
    return field(default=default, metadata={"help": text})


def parse(
    kinds: Sequence[type],
    name: str,
    words: Sequence[str],
    summary: str,
    *,
    usage: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> list[Any]:
    """
    Returns the options of `gumiho NAME`, an object of each kind. An unknown option ends the program with the usage.

    Args:
        kinds: Dataclasses.
        name: The command's name.
        words: The command line after it.
        summary: What the command does.
        usage: Its most important options. By default those that must be given.
        defaults: Replace those of the fields.
        groups: The options that `--help` shows, by heading; `--help_all` shows the others, too. By default `--help`
            shows all.
    """
    parser = _Parser(kinds, name, summary, usage, groups or {})
    parser.set_defaults(**defaults or {})
    with as_user_errors():  # of `TrainingArguments`, too
        *parsed, unknown = parser.parse_args_into_dataclasses(list(words), return_remaining_strings=True)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return parsed


class _Parser(HfArgumentParser):
    """A parser whose help has each option once, in groups."""

    def __init__(
        self, kinds: Sequence[type], name: str, summary: str, usage: str | None, groups: Mapping[str, Sequence[str]]
    ):
        self.groups, self.options = groups, list[Action]()
        super().__init__(kinds, prog=f"gumiho {name}", description=summary, formatter_class=_HelpFormatter)
        if groups:
            self.add_argument("--help_all", action="store_true", default=SUPPRESS, help="show all options and exit")
        given = [f"{_name_of(action)} {action.dest.upper()}" for action in self.options if action.required]
        self.usage = " ".join([self.prog, *([usage] if usage else given), "[options]"])

    def add_argument(self, *names: str, **settings: Any) -> Action:
        self.options.append(super().add_argument(*names, **settings))
        return self.options[-1]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.groups and "--help_all" in args:
            self.groups = {}
            self.print_help()
            self.exit()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        formatter = self.formatter_class(prog=self.prog)
        formatter.add_usage(self.usage, self.options, [])
        formatter.add_text(self.description)
        # A switch that is on by default has a second action, which turns it off.
        actions = {action.dest: action for action in reversed(self.options)}
        groups = self.groups or {"options": [name for name in reversed(actions) if name != "help_all"]}
        for heading, names in groups.items():
            formatter.start_section(heading)
            formatter.add_arguments([actions[name] for name in names])
            formatter.end_section()
        if self.groups:
            formatter.add_text("--help_all also shows all options of transformers' TrainingArguments.")
        return formatter.format_help()


class _HelpFormatter(ArgumentDefaultsHelpFormatter):
    """Shows each option in one spelling, and each default once."""

    def __init__(self, prog: str, **kwargs: Any):
        super().__init__(prog, max_help_position=_WIDEST_NAME, **kwargs)

    def _format_action_invocation(self, action: Action) -> str:
        if action.dest == "help":
            return "-h, --help"
        if action.choices is not None or (action.nargs == "?" and not action.default):
            value = "" if action.choices is None else f" {'|'.join(map(str, action.choices))}"
        else:
            value = f" {_VALUES.get(action.type, 'NAME')}{' ...' * (action.nargs == '+')}"
        return _name_of(action) + value * (action.nargs != 0)

    def _get_help_string(self, action: Action) -> str | None:
        is_shown = action.default in (None, False, [], SUPPRESS) or "(default: " in (action.help or "")
        return action.help if is_shown else super()._get_help_string(action)


def _name_of(action: Action) -> str:
    """Returns the first spelling of an option; the others are accepted, too."""
    return action.option_strings[0]
