"""Options of `gumiho data` and `gumiho train` that contradict others: they choose data that would not be used."""

from collections.abc import Sequence
from typing import Any

from ...commands import UserValueError
from .defaults import given_options


_CHOOSE_DATA = ("data", "num_rows", "openings", "regenerate")


def check_idle(args: Any, words: Sequence[str]) -> None:
    """Raises `ValueError` where an option on the command line chooses other data than what is used."""
    given, idle = given_options(words), {}
    if args.writes_prompts:
        idle["num_rows"] = "with --data none: use --num_prompts"
        if not getattr(args, "regenerate", True):
            idle["regenerate"] = "with --data none, which has no answers"
    else:
        idle["openings"] = "without --data none"
    if getattr(args, "features", None) is not None:
        idle = dict.fromkeys(_CHOOSE_DATA, "with --features, which holds prepared data")
    for name in _CHOOSE_DATA:
        if name in given and name in idle:
            raise UserValueError(f"--{name} has no effect {idle[name]}. Leave it out.")
