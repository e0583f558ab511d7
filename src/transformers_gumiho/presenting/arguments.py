"""The options of `gumiho generate`, `gumiho show` and `gumiho demo`."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class PairArguments:
    """The options that all three commands have. They need a pair, or a target and an assistant."""

    pair: str | None = field(
        default=None, metadata={"help": "The short name of a target and its drafter: demo or smollm2."}
    )
    target: str | None = field(default=None, metadata={"help": "The target: a folder or a name on the Hub."})
    assistant: str | None = field(
        default=None, metadata={"help": "The Gumiho drafter: a folder or a name on the Hub."}
    )
    num_assistant_tokens: int | None = field(default=None, metadata={"help": "Instead of the drafter's own setting."})
    branching_factor: int | None = field(default=None, metadata={"help": "Instead of the drafter's own setting."})
    draft_temperature: float | None = field(default=None, metadata={"help": "Instead of the drafter's own setting."})
    dtype: str = field(default="auto", metadata={"help": "Precision of both models."})
    device_map: str | None = field(default=None, metadata={"help": "Where the target goes (default: one device)."})


@dataclass(kw_only=True)
class TerminalArguments(PairArguments):
    """The options of the commands that write into a terminal."""

    color: Literal["auto", "always", "never"] = field(
        default="auto", metadata={"help": "auto: in a terminal, unless NO_COLOR is set."}
    )
    prompt_lookup_num_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Also draft so many tokens that followed the same words before; 0 for none (default: the "
            "drafter's setting)."
        },
    )


@dataclass(kw_only=True)
class GenerateArguments(TerminalArguments):
    """The options of `gumiho generate`; [`generate`] takes them, too."""

    prompt: str | None = field(default=None, metadata={"help": "What to answer (default: every line that is typed)."})
    max_new_tokens: int = field(default=256, metadata={"help": "Tokens of each answer, at most."})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy."})
    seed: int = field(default=0, metadata={"help": "For sampling."})
    compare: bool = field(
        default=False, metadata={"help": "Then answer by plain decoding, too, and tell how the two compare."}
    )


@dataclass(kw_only=True)
class ShowArguments(TerminalArguments):
    """The options of `gumiho show`; [`show`] takes them, too."""

    prompt: str = field(metadata={"help": "The text to go on from."})
    step: int = field(default=1, metadata={"help": "Which verification cycle to show, counted from 1."})
    output: str | None = field(default=None, metadata={"help": "Also draw it into this file, .svg or .png."})


@dataclass(kw_only=True)
class DemoArguments(PairArguments):
    """The options of `gumiho demo`; [`demo`] and [`make_page`] take them, too."""

    host: str = field(default="127.0.0.1", metadata={"help": "0.0.0.0 lets other machines in."})
    port: int | None = field(default=None, metadata={"help": "By default the first free one from 7860 on."})
    max_new_tokens: int = field(default=512, metadata={"help": "The most that a visitor may ask for."})
    max_question_tokens: int = field(
        default=1024, metadata={"help": "The most that a question may have; also 16 characters for each."}
    )
    max_visitors: int = field(default=4, metadata={"help": "Questions answered at a time; others wait in line."})
