"""Errors that a user can fix: the package raises them, and a command prints them in one line."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
    "gradio": "demo", "gguf": "demo", "matplotlib": "benchmark", "datasets": "train", "evaluate": "train",
    "peft": "train", "openai": "train", "tensorboard": "train",
}  # fmt: skip
# What a shell reports for a program that Ctrl-C ended: 128, and the number of SIGINT.
INTERRUPTED = 130
# A full disk, and what the system does not permit, wherever they are noticed.
_STATES_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


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
        yield
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
