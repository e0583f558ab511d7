"""From a target to a trained, tuned and measured drafter: `gumiho data` and `gumiho train`."""

from .arguments import DataArguments, RecipeArguments
from .command import data, train


__all__ = ["DataArguments", "RecipeArguments", "data", "train"]
