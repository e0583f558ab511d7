"""Naming and loading a target and its drafter: the options of all commands, and the pairs that have a short name."""

from .arguments import DraftingArguments, PairArguments, prompts_field
from .loading import load_pair, load_target, use_options


__all__ = ["DraftingArguments", "PairArguments", "load_pair", "load_target", "prompts_field", "use_options"]
