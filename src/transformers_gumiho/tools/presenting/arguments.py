"""The options of `gumiho generate`, `gumiho show` and `gumiho demo`."""

from dataclasses import dataclass

from ...commands import REQUIRED, option
from ..pairs import DraftingArguments, prompts_field


@dataclass(kw_only=True)
class GenerateArguments(DraftingArguments):
    """The options of `gumiho generate`; [`generate`] takes them, too."""

    prompt: str | None = option("Prompt to answer (default: each line that you type).")
    prompts: str | None = prompts_field()
    system: str | None = option("System prompt of the conversation, if the chat template has one.")
    max_new_tokens: int = option("Maximum number of tokens in an answer.", 256, at_least=1)
    temperature: float = option("Sampling temperature; 0 is greedy.", 0.0, at_least=0)
    seed: int = option("Seed for sampling.", 0)
    compare: bool = option("Also generate without the drafter and report the speed-up.", False)
    output: str | None = option("Also draw the answer to --prompt into this SVG file.")


@dataclass(kw_only=True)
class ShowArguments(DraftingArguments):
    """The options of `gumiho show`; [`show`] takes them, too."""

    prompt: str = option("Prompt to decode.", REQUIRED)
    step: int = option("Verification cycle to show, counted from 1.", 1, at_least=1)
    output: str | None = option("Also draw the tree into this SVG file.")


@dataclass(kw_only=True)
class DemoArguments(DraftingArguments):
    """The options of `gumiho demo`; [`demo`] and [`make_page`] take them, too."""

    host: str = option("Address to listen on; 0.0.0.0 admits other machines.", "127.0.0.1")
    port: int | None = option("Port (default: the first free one from 7860).", at_least=1)
    max_new_tokens: int = option("Maximum number of new tokens that a visitor can set.", 512, at_least=1)
    max_question_tokens: int = option("Max question length in tokens (and 16 characters per token).", 1024, at_least=1)
    max_visitors: int = option("Questions answered at the same time; others are queued.", 4, at_least=1)
