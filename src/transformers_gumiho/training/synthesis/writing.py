"""Who writes prompts and answers: the target in this process, or one behind a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..written_rows import Turn
from .answer_features import AnswerFeatures


@dataclass(frozen=True)
class Text:
    """
    What was written.

    Attributes:
        text: Without its end; where a server wrote it, without special tokens.
        ended: Whether the target ended it, rather than a limit.
        num_tokens: Tokens of it.
        problem: Why it is of no use, if it is not.
        turn: The tokens that the target read and wrote, if known.
        features: What the target computed for it, if kept.
    """

    text: str
    ended: bool
    num_tokens: int
    problem: str | None = None
    turn: Turn | None = None
    features: AnswerFeatures | None = None


@dataclass(frozen=True)
class Request:
    """
    Messages for the target to answer.

    Attributes:
        messages: The system's, if any, and the user's.
        sampled: Whether the answer is sampled.
    """

    messages: list[dict[str, str]]
    sampled: bool


@dataclass(frozen=True)
class Start:
    """
    What stands before the words that a target writes for a user.

    Attributes:
        system: What the system says. By default, whatever the template says by itself.
        opening: The user's first words. By default, the target finds these, too.
    """

    system: str | None = None
    opening: str = ""


class Writer(Protocol):
    """Writes a batch of prompts, or of answers."""

    def write_user_turns(self, starts: Sequence[Start], seed: int) -> list[Text]:
        """Returns what a user might say first after each start, the opening included."""

    def answer(self, requests: Sequence[Request], seed: int) -> list[Text]:
        """Returns the answer to each request."""
