"""Who writes users' prompts: the target in this process, or one behind a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..row_leaving import continue_rows
from ..sampling import Sampling
from .user_turn import UserTurn, find_user_turn


@dataclass(frozen=True)
class Start:
    """
    What stands before the words that a target writes for a user.

    Attributes:
        system: What the system says. By default, whatever the template says.
        opening: The user's first words. By default, the target finds these, too.
    """

    system: str | None = None
    opening: str = ""


@dataclass(frozen=True)
class Text:
    """
    What was written.

    Attributes:
        text: Without its end; where a server wrote it, without special tokens.
        ended: Whether the target ended it, rather than a limit.
        num_tokens: Tokens of it.
        problem: Why it is of no use, if it is not.
    """

    text: str
    ended: bool
    num_tokens: int
    problem: str | None = None


class Writer(Protocol):
    """Writes a batch of prompts."""

    def write_user_turns(self, starts: Sequence[Start], seed: int) -> list[Text]:
        """Returns what a user might say first after each start, the opening included."""


class TargetWriter:
    """
    A target in this process.

    Args:
        target: The target.
        tokenizer: The target's, with a chat template.
        max_prompt_tokens: Tokens of a prompt that it writes, at most.
        sampling: How prompts are sampled.
    """

    def __init__(
        self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int, sampling: Sampling
    ):
        self.target, self.tokenizer, self.sampling = target.eval(), tokenizer, sampling
        self.max_prompt_tokens = max_prompt_tokens
        self._turns: dict[str | None, UserTurn] = {}

    def write_user_turns(self, starts: Sequence[Start], seed: int) -> list[Text]:
        torch.manual_seed(seed)
        turns = [self._turn(start.system) for start in starts]
        end = self.target.generation_config.eos_token_id
        ends = {*(end if isinstance(end, list) else [end])} - {None}
        ends = ends.union(*(turn.ends(self.tokenizer) for turn in turns))
        prompts = [turn.opening_ids(self.tokenizer, start.opening) for turn, start in zip(turns, starts, strict=True)]
        pad = min(ends, default=0)
        kwargs = self.sampling.generate_kwargs | {"eos_token_id": sorted(ends) or None, "pad_token_id": pad}
        written = continue_rows(self.target, prompts, self.max_prompt_tokens, ends, pad, kwargs)
        return [self._read(*parts, ends) for parts in zip(turns, starts, prompts, written, strict=True)]

    def _read(self, turn: UserTurn, start: Start, prompt: list[int], tokens: list[int], ends: set[int]) -> Text:
        ended = tokens[-1] in ends
        said = tokens[: -1 if ended else None]
        # Where it follows an opening, it is decoded with it: alone it may lack a space in front.
        before = prompt if start.opening else []
        text = start.opening + self.tokenizer.decode(before + said)[len(self.tokenizer.decode(before)) :]
        cut = turn.cut(text)
        return Text(cut, ended or cut != text.strip(), len(tokens))

    def _turn(self, system: str | None) -> UserTurn:
        if system not in self._turns:
            self._turns[system] = find_user_turn(self.tokenizer, system)
        return self._turns[system]
