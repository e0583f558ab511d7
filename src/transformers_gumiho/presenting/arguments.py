"""The options of `gumiho generate`, `gumiho show` and `gumiho demo`."""

from dataclasses import dataclass, field
from typing import Literal

from ..pairs import DraftingArguments, prompts_field


@dataclass(kw_only=True)
class TerminalArguments(DraftingArguments):
    """The options of the commands that write into a terminal."""

    color: Literal["auto", "always", "never"] = field(
        default="auto", metadata={"help": "`auto` colors text in a terminal, unless NO_COLOR is set."}
    )


@dataclass(kw_only=True)
class GenerateArguments(TerminalArguments):
    """The options of `gumiho generate`; [`generate`] takes them, too."""

    prompt: str | None = field(default=None, metadata={"help": "Prompt to answer (default: each line that you type)."})
    prompts: str | None = prompts_field(default=None)
    max_new_tokens: int = field(default=256, metadata={"help": "Maximum number of tokens in an answer."})
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature; 0 is greedy."})
    seed: int = field(default=0, metadata={"help": "Seed for sampling."})
    compare: bool = field(
        default=False, metadata={"help": "Also generate without the drafter and report the speed-up."}
    )


@dataclass(kw_only=True)
class ShowArguments(TerminalArguments):
    """The options of `gumiho show`; [`show`] takes them, too."""

    prompt: str = field(metadata={"help": "Prompt to decode."})
    step: int = field(default=1, metadata={"help": "Verification cycle to show, counted from 1."})
    output: str | None = field(default=None, metadata={"help": "Also draw the tree into this SVG file."})


@dataclass(kw_only=True)
class DemoArguments(DraftingArguments):
    """The options of `gumiho demo`; [`demo`] and [`make_page`] take them, too."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on; 0.0.0.0 admits other machines."})
    port: int | None = field(default=None, metadata={"help": "Port (default: the first free one from 7860)."})
    max_new_tokens: int = field(default=512, metadata={"help": "Maximum number of new tokens that a visitor can set."})
    max_question_tokens: int = field(
        default=1024, metadata={"help": "Max question length in tokens (and 16 characters per token)."}
    )
    max_visitors: int = field(default=4, metadata={"help": "Questions answered at the same time; others are queued."})
