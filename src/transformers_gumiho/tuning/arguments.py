"""The options of `gumiho tune`."""

from dataclasses import dataclass

from ..options import option
from ..pairs import PairArguments, prompts_field


@dataclass(kw_only=True)
class TuningArguments(PairArguments):
    """The options of `gumiho tune`; [`tune`] takes them, too. They need a pair, or target and assistant."""

    prompts: str | None = prompts_field()
    output_dir: str | None = option("Receives `generation_config.json` (default: the drafter's folder).")
    num_prompts: int = option("Prompts to read. Trees compete on two thirds; the last third times the winner.", 18)
    max_new_tokens: int = option("Tokens to generate for each of them.", 64)
    batch_sizes: list[int] = option("Rows to choose a tree size for.", [1, 4, 8])
    temperature: float = option("The temperature to tune for; 0 is greedy.", 0.0)
    tune_vocabulary: bool = option("Choose the tokens that may be drafted, too.", True)
