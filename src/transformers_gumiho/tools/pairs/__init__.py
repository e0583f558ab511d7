"""The options that name a target and its drafter in all commands, loading both, and pairs with a short name."""

from .arguments import DraftingArguments, PairArguments, prompts_field
from .loading import load_pair, load_target, own_settings, use_options


__all__ = [
    "DraftingArguments",
    "PairArguments",
    "load_pair",
    "load_target",
    "own_settings",
    "prompts_field",
    "use_options",
]
