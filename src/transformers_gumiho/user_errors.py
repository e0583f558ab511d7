"""Errors that a user can fix end a program with one line instead of a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


# Libraries that only some commands need, and the extra of this package that installs them.
_EXTRAS = {
    "gradio": "demo", "gguf": "demo", "matplotlib": "benchmark", "datasets": "train", "evaluate": "train",
    "peft": "train", "tensorboard": "train",
}  # fmt: skip


@contextmanager
def reported_in_one_line(program: str, *further: type[Exception]) -> Iterator[None]:
    """
    Ends the program with only the message if the block raises an error that a user can fix: a missing file, a setting
    out of range, a library that is not installed, a full disk. The message says how to fix it, and a traceback would
    not help. Every other error keeps its traceback.

    Args:
        program: Name of the program, with which the message begins.
        further: Other classes of errors to report in this way.

    Raises:
        SystemExit: In place of such an error, which is its `__cause__`.
    """
    fixable: tuple[type[Exception], ...] = (ImportError, OSError, ValueError, *further)
    try:
        yield
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        # A module's package may have another name, so a command is given only for known ones.
        way_out = f". Install it with `pip install 'transformers-gumiho[{extra}]'`." if extra else ""
        raise SystemExit(f"{program}: {error}{way_out}") from error
    except fixable as error:
        raise SystemExit(f"{program}: {error}") from error
