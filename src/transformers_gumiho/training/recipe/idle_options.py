"""
Options of `gumiho data` and `gumiho train` that are given, and can have no effect beside the others. Those that choose
the data are refused. The others are named in a line, and the command goes on.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...commands import UserValueError
from .defaults import given_options
from .writing import say


class _Idle(NamedTuple):
    """Options that have no effect where something is so, in words."""

    names: str
    why: str
    is_so: Callable[[Any], bool]


_CHOOSE_DATA = {"data", "num_rows", "openings", "regenerate"}
_SAMPLING = "temperature top_p top_k"
_ANSWERS = f"max_new_tokens writing_batch_size sampled_share {_SAMPLING} endpoint endpoint_model concurrency"
_OF_BOTH = [
    _Idle("num_prompts openings max_prompt_tokens", "without --data none", lambda args: not args.writes_prompts),
    _Idle("num_rows data_split", "with --data none: use --num_prompts", lambda args: args.writes_prompts),
    _Idle("endpoint_model concurrency", "without --endpoint", lambda args: args.endpoint is None),
    _Idle("writing_batch_size", "with --endpoint: use --concurrency", lambda args: args.endpoint is not None),
    _Idle(_SAMPLING, "with --sampled_share 0", lambda args: args.sampled_share == 0 and not args.writes_prompts),
]
IDLE = {
    "data": [
        *_OF_BOTH,
        _Idle("target_dtype device_map", "with --endpoint, which has the target", lambda a: a.endpoint is not None),
    ],
    "train": [
        _Idle(
            f"data data_split num_rows num_prompts openings max_prompt_tokens regenerate {_ANSWERS} chat_template "
            "chat_template_kwargs max_length num_proc target_dtype device_map cache_features features_dtype",
            "with --features, which holds prepared data", lambda args: args.features is not None,
        ),
        _Idle(_ANSWERS, "with --regenerate false, which keeps the data's answers", lambda args: not args.regenerate),
        _Idle("regenerate", "with --data none, which has no answers", lambda a: a.writes_prompts and not a.regenerate),
        *_OF_BOTH,
        _Idle("features_dtype", "with --cache_features false", lambda args: args.cache_features == "false"),
        _Idle("num_acceptance_prompts", "with --num_eval_rows 0", lambda args: not args.num_eval_rows),
        _Idle("acceptance_max_new_tokens", "without --num_acceptance_prompts", lambda a: not a.num_acceptance_prompts),
        _Idle("restart", "with --plan, which starts nothing", lambda args: args.plan),
        _Idle("hub_strategy hub_always_push", "as the finished drafter alone is pushed", lambda args: True),
    ],
}  # fmt: skip


def check_idle(command: str, args: Any, words: Sequence[str]) -> None:
    """
    Tells which options on the command line of `gumiho data` or `train` have no effect.

    Raises:
        ValueError: One of them chooses other data.
    """
    given = given_options(words)
    for names, why, is_so in IDLE[command]:
        idle = [name for name in names.split() if name in given]
        if not idle or not is_so(args):
            continue
        for name in _CHOOSE_DATA.intersection(idle):
            raise UserValueError(f"--{name} has no effect {why}. Leave it out.")
        say(f"{', '.join(f'--{name}' for name in idle)}: no effect {why}.")
