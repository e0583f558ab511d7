"""The options that name a target and its drafter in all commands, loading both, and pairs with a short name."""

from .arguments import DraftingArguments, PairArguments, prompts_field
from .models import load_pair, load_target, settings_of, use_options


__all__ = [
    "DraftingArguments",
    "PairArguments",
    "load_pair",
    "load_target",
    "prompts_field",
    "settings_of",
    "use_options",
]
