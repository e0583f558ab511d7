"""The options of `gumiho tune`."""

from dataclasses import dataclass, field


@dataclass
class TuningArguments:
    """The options of `gumiho tune`; [`tune`] takes them, too."""

    target: str = field(metadata={"help": "The target: a folder or a name on the Hub."})
    assistant: str = field(metadata={"help": "The Gumiho drafter: a folder or a name on the Hub."})
    prompts: str | None = field(
        default=None,
        metadata={
            "help": "A JSONL file with `turns`, `prompt` or `text`, or a dataset. Without it, the target generates "
            "its own prompts."
        },
    )
    output_dir: str | None = field(
        default=None, metadata={"help": "Receives `generation_config.json` (default: the drafter's folder)."}
    )
    num_prompts: int = field(
        default=18, metadata={"help": "Prompts to read. Trees compete on two thirds; the winner is timed on the rest."}
    )
    max_new_tokens: int = field(default=64, metadata={"help": "Tokens to generate for each of them."})
    batch_sizes: list[int] = field(
        default_factory=lambda: [1, 4, 8], metadata={"help": "Rows to choose a tree size for."}
    )
    temperature: float = field(default=0.0, metadata={"help": "The temperature to tune for; 0 is greedy."})
    tune_vocabulary: bool = field(default=True, metadata={"help": "Choose the tokens that may be drafted, too."})
    dtype: str = field(default="auto", metadata={"help": "Precision of both models."})
    device_map: str | None = field(default=None, metadata={"help": "Where the target goes (default: one device)."})
