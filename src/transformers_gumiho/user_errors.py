"""Errors that a user can fix end a program with one line."""

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
    Ends the program with the message alone where what runs within it raises an error that a user can fix: a file
    that is not there, a setting out of range, a library that is not installed, a full disk. The message says how, and
    where it was raised does not help. Every other error keeps its traceback.

    Args:
        program: What the message begins with.
        further: Classes of other errors that are reported this way.

    Raises:
        SystemExit: Instead of such an error, which is its cause.
    """
    fixable: tuple[type[Exception], ...] = (ImportError, OSError, ValueError, *further)
    try:
        yield
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        # A module may be part of a package with another name, so a command is given only where it is known.
        way_out = f". Install it with `pip install 'transformers-gumiho[{extra}]'`." if extra else ""
        raise SystemExit(f"{program}: {error}{way_out}") from error
    except fixable as error:
        raise SystemExit(f"{program}: {error}") from error
