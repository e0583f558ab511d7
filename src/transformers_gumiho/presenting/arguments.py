"""The options of `gumiho generate`, `gumiho show` and `gumiho demo`."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class PairArguments:
    """The options that all three commands have. They need a pair, or a target and an assistant."""

    pair: str | None = field(
        default=None, metadata={"help": "Short name of a target and its drafter: demo or smollm2."}
    )
    target: str | None = field(default=None, metadata={"help": "Target model: a folder or a name on the Hub."})
    assistant: str | None = field(default=None, metadata={"help": "Gumiho drafter: a folder or a name on the Hub."})
    num_assistant_tokens: int | None = field(
        default=None, metadata={"help": "Draft tokens verified per cycle (default: the drafter's setting)."}
    )
    branching_factor: int | None = field(
        default=None,
        metadata={"help": "Tokens kept at each serial step; 1 drafts a chain (default: the drafter's setting)."},
    )
    draft_temperature: float | None = field(
        default=None, metadata={"help": "Temperature of the draft probabilities (default: the drafter's setting)."}
    )
    dtype: str = field(default="auto", metadata={"help": "Precision of both models, e.g. `bfloat16`."})
    device_map: str | None = field(
        default=None, metadata={"help": "`device_map` for the target, e.g. `auto` (default: one device)."}
    )


@dataclass(kw_only=True)
class TerminalArguments(PairArguments):
    """The options of the commands that write into a terminal."""

    color: Literal["auto", "always", "never"] = field(
        default="auto", metadata={"help": "`auto` colors text in a terminal, unless NO_COLOR is set."}
    )
    prompt_lookup_num_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Maximum number of tokens to draft by prompt lookup; 0 for none (default: the drafter's setting)."
        },
    )


@dataclass(kw_only=True)
class GenerateArguments(TerminalArguments):
    """The options of `gumiho generate`; [`generate`] takes them, too."""

    prompt: str | None = field(default=None, metadata={"help": "Prompt to answer (default: each line that you type)."})
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
    output: str | None = field(default=None, metadata={"help": "Also draw the tree into this file, .svg or .png."})


@dataclass(kw_only=True)
class DemoArguments(PairArguments):
    """The options of `gumiho demo`; [`demo`] and [`make_page`] take them, too."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on; 0.0.0.0 admits other machines."})
    port: int | None = field(default=None, metadata={"help": "Port (default: the first free one from 7860)."})
    max_new_tokens: int = field(default=512, metadata={"help": "Maximum number of new tokens that a visitor can set."})
    max_question_tokens: int = field(
        default=1024, metadata={"help": "Max question length in tokens (and 16 characters per token)."}
    )
    max_visitors: int = field(default=4, metadata={"help": "Questions answered at the same time; others are queued."})
