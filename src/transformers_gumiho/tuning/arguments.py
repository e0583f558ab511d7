"""The options of `gumiho tune`."""

from dataclasses import dataclass

from ..options import option
from ..pairs import PairArguments, prompts_field


@dataclass(kw_only=True)
class TuningArguments(PairArguments):
    """The options of `gumiho tune`; [`tune`] takes them, too. They name a pair, or a target and an assistant."""

    prompts: str | None = prompts_field(without=" Without it, the target samples its own prompts.")
    output_dir: str | None = option("Receives `generation_config.json` (default: the drafter's folder).")
    num_prompts: int = option("Number of prompts: two thirds choose the tree, one third times the winner.", 18)
    max_new_tokens: int = option("Maximum number of tokens per prompt.", 64)
    batch_sizes: list[int] = option("Numbers of rows for which to choose a tree size.", [1, 4, 8])
    temperature: float = option("Sampling temperature to tune for; 0 is greedy.", 0.0)
    tune_vocabulary: bool = option("Also choose the tokens that may be drafted.", True)
