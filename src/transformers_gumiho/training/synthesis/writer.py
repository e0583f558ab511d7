"""Who writes prompts and answers: the target in this process, or one behind a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..rendering import render_prompt
from .continuation import BatchContinuation, Sampling
from .user_turn import UserTurn, find_user_turn


@dataclass(frozen=True)
class Text:
    """
    What was written.

    Attributes:
        text: Without special tokens.
        ended: Whether the target ended it, rather than a limit.
        num_tokens: Tokens of it.
    """

    text: str
    ended: bool
    num_tokens: int


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


class Writer(Protocol):
    """Writes a batch of prompts, or of answers."""

    def write_user_turns(self, systems: Sequence[str | None], seed: int) -> list[Text]:
        """Returns what a user might say first after each system prompt."""

    def answer(self, requests: Sequence[Request], seed: int) -> list[Text]:
        """Returns the answer to each request."""


class TargetWriter:
    """
    A target in this process.

    Args:
        target: The target.
        tokenizer: The target's, with a chat template.
        max_prompt_tokens: Tokens of a prompt that it writes, at most.
        max_new_tokens: Tokens of an answer, at most.
        sampling: How prompts and sampled answers are sampled.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        max_new_tokens: int,
        sampling: Sampling,
    ):
        self.target, self.tokenizer, self.sampling = target, tokenizer, sampling
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        ends = target.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}
        self._turns: dict[str | None, UserTurn] = {}

    def write_user_turns(self, systems: Sequence[str | None], seed: int) -> list[Text]:
        turns = [self._turn(system) for system in systems]
        ends = self.ends.union(*(turn.ends(self.tokenizer) for turn in turns))
        write = BatchContinuation(self.target, ends, self.sampling)
        prompts = [turn.opening_ids(self.tokenizer) for turn in turns]
        results = write(prompts, self.max_prompt_tokens, [True] * len(prompts), seed)
        texts = []
        for turn, result in zip(turns, results, strict=True):
            text = self.tokenizer.decode(result.tokens[: -1 if result.ended else None])
            cut = turn.cut(text)
            texts.append(Text(cut, result.ended or cut != text.strip(), len(result.tokens)))
        return texts

    def answer(self, requests: Sequence[Request], seed: int) -> list[Text]:
        write = BatchContinuation(self.target, self.ends, self.sampling)
        prompts = [render_prompt(self.tokenizer, request.messages) for request in requests]
        results = write(prompts, self.max_new_tokens, [request.sampled for request in requests], seed)
        return [
            Text(self.tokenizer.decode(result.tokens, skip_special_tokens=True), result.ended, len(result.tokens))
            for result in results
        ]

    def _turn(self, system: str | None) -> UserTurn:
        if system not in self._turns:
            self._turns[system] = find_user_turn(self.tokenizer, system)
        return self._turns[system]
