"""The options of `gumiho tune`."""

from dataclasses import dataclass, field

from ..pairs import PairArguments, prompts_field


@dataclass(kw_only=True)
class TuningArguments(PairArguments):
    """The options of `gumiho tune`; [`tune`] takes them, too. They need a pair, or target and assistant."""

    prompts: str | None = prompts_field(default=None)
    output_dir: str | None = field(
        default=None, metadata={"help": "Receives `generation_config.json` (default: the drafter's folder)."}
    )
    num_prompts: int = field(
        default=18, metadata={"help": "Prompts to read. Trees compete on two thirds; the last third times the winner."}
    )
    max_new_tokens: int = field(default=64, metadata={"help": "Tokens to generate for each of them."})
    batch_sizes: list[int] = field(
        default_factory=lambda: [1, 4, 8], metadata={"help": "Rows to choose a tree size for."}
    )
    temperature: float = field(default=0.0, metadata={"help": "The temperature to tune for; 0 is greedy."})
    tune_vocabulary: bool = field(default=True, metadata={"help": "Choose the tokens that may be drafted, too."})
