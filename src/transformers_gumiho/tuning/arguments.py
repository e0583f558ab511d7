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
            "help": "A JSONL file with `turns`, `prompt` or `text`, or a dataset. Without it, the target begins texts."
        },
    )
    output_dir: str | None = field(
        default=None, metadata={"help": "Receives `generation_config.json` (default: the drafter's folder)."}
    )
    num_prompts: int = field(default=16, metadata={"help": "Prompts to measure acceptance on."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens to generate for each of them."})
    max_tree_size: int = field(default=256, metadata={"help": "Drafted tokens of the largest tree to consider."})
    temperature: float = field(default=0.0, metadata={"help": "The temperature to tune for; 0 is greedy."})
    repeats: int = field(
        default=3,
        metadata={
            "help": "Times that each shape of a cycle is timed; vocabularies and greedy cycles by size three times as "
            "often."
        },
    )
    tune_vocabulary: bool = field(default=True, metadata={"help": "Choose the tokens that may be drafted, too."})
    tune_sizes: bool = field(default=True, metadata={"help": "Measure what cycles cost, so that sizes can fit."})
    dtype: str = field(default="auto", metadata={"help": "Precision of both models."})
    device_map: str | None = field(default=None, metadata={"help": "Where the target goes (default: one device)."})
