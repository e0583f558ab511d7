"""Commands: their options, and the errors that a user can fix."""

import errno
import math
import os
import shutil
import sys
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool


class UserError(Exception):
    """
    An error that a user can fix. Its message says what failed, the value, and the fix. The package raises one of the
    classes below, which are also the documented built-in ones.
    """


class UserValueError(UserError, ValueError):
    """A setting is out of range, or a file does not hold what it should."""


class UserOSError(UserError, OSError):
    """A file or folder cannot be read, written or downloaded."""


class UserFileNotFoundError(UserOSError, FileNotFoundError):
    """A file or folder is missing."""


class UserImportError(UserError, ImportError):
    """A library is not installed."""


class UserFloatingPointError(UserError, FloatingPointError):
    """A training diverged, or a model computes numbers that are not finite."""


# Libraries that only some commands need, and the extra of this package that installs them.
_EXTRAS = {
    "gradio": "demo", "gguf": "demo", "datasets": "train", "evaluate": "train", "peft": "train", "openai": "train",
    "tensorboard": "train",
}  # fmt: skip
# What a shell reports for a program that Ctrl-C ended: 128, and the number of SIGINT.
INTERRUPTED = 130
# A full disk, and what the system does not permit, wherever they are noticed.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_STATES_OF_THE_MACHINE = (*_FULL, errno.EACCES, errno.EROFS)
_FREE_BYTES = 2**16  # below which a failure is one of the disk


@contextmanager
def as_user_errors() -> Iterator[None]:
    """
    Makes the errors of libraries and the system user errors, within a block that reads or writes what a user named: a
    model, a data set, a file or a folder. The message stays theirs.

    Raises:
        UserFileNotFoundError: In place of a `FileNotFoundError`.
        UserImportError: In place of another `ImportError` than a missing module.
        UserOSError: In place of another `OSError`.
        UserValueError: In place of a `ValueError`.
    """
    try:
        yield
    except (UserError, ModuleNotFoundError):
        raise
    except FileNotFoundError as error:
        raise UserFileNotFoundError(str(error)) from error
    except OSError as error:
        raise UserOSError(str(error)) from error
    except ImportError as error:
        raise UserImportError(str(error)) from error
    except ValueError as error:
        raise UserValueError(str(error)) from error


def make_folder(folder: Path) -> None:
    """Makes a folder of `--output_dir`, unless it is there. Raises `OSError` where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserOSError(
            f"The folder {str(folder)!r} cannot be made: {error.strerror}. Name another one with --output_dir."
        ) from error


@contextmanager
def full_disk_told(folder: Path) -> Iterator[None]:
    """Raises `OSError` where something fails within this and the disk of a folder is full, whatever a library says."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not says_full(error) and shutil.disk_usage(folder).free >= _FREE_BYTES:
            raise
        message = f"The disk is full ({error}). Make room and run this again: it continues here"
        raise UserOSError(errno.ENOSPC, message, str(folder)) from error


def says_full(error: Exception) -> bool:
    """Whether an error says that the disk is full. Libraries in other languages have the number only in the text."""
    return getattr(error, "errno", None) in _FULL or any(f"os error {number})" in str(error) for number in _FULL)


@contextmanager
def reported_in_one_line(program: str) -> Iterator[None]:
    """
    Ends the program with one line if the block raises a [`UserError`], lacks a library of an extra, may not write or
    finds the disk full, or is interrupted. Every other error keeps its traceback.

    Args:
        program: Name of the program, with which the line begins.

    Raises:
        SystemExit: In place of such an error, which is its `__cause__`. After Ctrl-C its code is 130.
    """
    try:
        try:
            yield
        except SystemExit:  # after `--help`
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # what is buffered meets a closed pipe or a full disk here
    except UserError as error:
        raise SystemExit(f"{program}: {error}") from error
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        message = f"{program}: {error}. Install it with `pip install 'transformers-gumiho[{extra}]'`."
        raise SystemExit(message) from error
    except BrokenPipeError as error:
        # The reader has gone, as `head` does. What is still buffered must not raise the same again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from error
    except OSError as error:
        if error.errno not in _STATES_OF_THE_MACHINE:
            raise
        raise SystemExit(f"{program}: {error}") from error
    except KeyboardInterrupt as error:
        sys.stderr.write(f"\n{program}: {str(error) or 'Interrupted.'}\n")
        raise SystemExit(INTERRUPTED) from error


REQUIRED = MISSING
_NUM_SEEDS = 2**32  # that NumPy takes; PyTorch takes more
_WIDEST_NAME = 36
_NOT_GIVEN = object()
# What an option takes, by the function that reads it; `BOOL` is true or false.
_VALUES = {int: "N", float: "X", string_to_bool: "BOOL", Path: "FILE"}


def option(text: str, default: Any = None, at_least: float | None = None) -> Any:
    """
    Returns a field with this help text, for [`check_limits`] with its smallest value. A list is copied; an option
    whose default is `REQUIRED` must be given.
    """
    metadata = {"help": text} if at_least is None else {"help": text, "at_least": at_least}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_limits(args: Any) -> None:
    """Raises `ValueError` for an option that is not finite, or below its smallest value."""
    for item in fields(args):
        smallest, given = item.metadata.get("at_least"), getattr(args, item.name)
        for value in given if isinstance(given, list) else [given]:
            if None not in (smallest, value) and not smallest <= value < math.inf:
                raise UserValueError(f"--{item.name} must be at least {smallest}, got {value}.")


def parse(kinds: Sequence[type], name: str, words: Sequence[str], summary: str) -> list[Any]:
    """Returns the options of `gumiho NAME`, an object of each kind. Arguments as in [`read_words`]."""
    return build(kinds, read_words(kinds, name, words, summary))


def read_words(
    kinds: Sequence[type],
    name: str,
    words: Sequence[str],
    summary: str,
    *,
    usage: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """
    Returns the values of the options that a command line gives. An unknown option ends the program with the usage.

    Args:
        kinds: Dataclasses.
        name: The command's name.
        words: The command line after it.
        summary: What the command does.
        usage: Its most important options. By default those that must be given.
        defaults: What `--help` shows in place of the defaults of the fields.
        groups: The options that `--help` shows, by heading; `--help_all` shows the others, too. By default `--help`
            shows all.
    """
    parser = _Parser(kinds, name, summary, usage, groups or {})
    parser.set_defaults(**defaults or {})
    # Filled in before, so that no default takes the place of what is not given.
    found = Namespace(**{action.dest: _NOT_GIVEN for action in parser.options})
    _, unknown = parser.parse_known_args(list(words), found)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return {option_name: value for option_name, value in vars(found).items() if value is not _NOT_GIVEN}


def build(kinds: Sequence[type], values: Mapping[str, Any]) -> list[Any]:
    """
    Returns an object of each kind with these values of its fields. Raises `ValueError` for one that a kind refuses,
    for an empty one, and for a seed that libraries do not take.
    """
    with as_user_errors():  # of `TrainingArguments`, too
        built = [
            kind(**{item.name: values[item.name] for item in fields(kind) if item.name in values}) for kind in kinds
        ]
    # As of a variable that a script has not set: an empty folder would be the one that the script runs in.
    for item, value in ((item, vars(options)[item.name]) for options in built for item in fields(options)):
        if value == "" != item.default:
            raise UserValueError(f"--{item.name} is empty. Give a value, or leave the option out.")
        if item.name in ("seed", "data_seed") and not 0 <= (value or 0) < _NUM_SEEDS:
            raise UserValueError(f"--{item.name} must be from 0 to {_NUM_SEEDS - 1}, got {value}.")
    return built


class _Parser(HfArgumentParser):
    """A parser whose help has each option once, in groups."""

    def __init__(
        self, kinds: Sequence[type], name: str, summary: str, usage: str | None, groups: Mapping[str, Sequence[str]]
    ):
        self.groups, self.options = groups, list[Action]()
        # No abbreviations: defaults depend on which options are given.
        super().__init__(
            kinds, prog=f"gumiho {name}", description=summary, formatter_class=_HelpFormatter, allow_abbrev=False
        )
        if groups:
            self.add_argument("--help_all", action="store_true", default=SUPPRESS, help="show all options and exit")
        given = [f"{_name_of(action)} {action.dest.upper()}" for action in self.options if action.required]
        self.usage = " ".join([self.prog, *([usage] if usage else given), "[options]"])

    def add_argument(self, *names: str, **settings: Any) -> Action:
        settings.pop("at_least", None)
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
        has_none = action.default == [] or any(action.default is value for value in (None, False, SUPPRESS))
        is_shown = "(default: " in (action.help or "")
        return action.help if has_none or is_shown else super()._get_help_string(action)


def _name_of(action: Action) -> str:
    """Returns the first spelling of an option; the others are accepted, too."""
    return action.option_strings[0]
