"""Letting the target answer itself: a drafter has to imitate what the target says, not what someone else said."""

import random
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import dropwhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...open_text import encode_open_text
from ...user_errors import UserValueError
from ..data.conversations import Conversation, MalformedRowError, RawText, read_row
from ..data.rendering import Renderer
from ..data.written import Generation
from .requests import Completion, Request, Sampling, Task


# An answer that was cut while it repeated a phrase of at most so many tokens, over at least so many tokens, would do
# so forever.
_LONGEST_PHRASE, _LOOP_TOKENS = 64, 128


@dataclass(frozen=True)
class WritingSettings:
    """
    How a target answers.

    Attributes:
        max_length: Tokens of a conversation, at most.
        max_new_tokens: Tokens of an answer, at most.
        sampling: How answers are sampled, and which share of the rows is.
        seed: For sampling.
        num_prompt_tokens: Tokens of a raw text that the target continues.
    """

    max_length: int = 2048
    max_new_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    num_prompt_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("max_length", "max_new_tokens", "num_prompt_tokens"):
            if getattr(self, name) < 1:
                raise UserValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")


class AnswerWriter:
    """Writes rows anew with what a target says in them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: WritingSettings):
        self.tokenizer, self.settings, self.renderer = tokenizer, settings, Renderer(tokenizer)

    def write(self, number: int, row: Mapping[str, Any]) -> Task:
        """Asks for what belongs into a row; what it draws depends on the row's number alone."""
        chance = random.Random(f"{self.settings.seed} {number}")
        sampling = self.settings.sampling if chance.random() < self.settings.sampling.share else None
        try:
            example = read_row(row, has_template=bool(self.tokenizer.chat_template), answered=False)
            write = self._continue if isinstance(example, RawText) else self._answer
            written = yield from write(example, sampling, chance)  # type: ignore[arg-type]
        except MalformedRowError as error:
            return {"skipped": str(error)}
        generations = [asdict(generation) for generation in written["generations"]]
        ended = generations[-1]["ended"]
        return written | {"generations": generations, "sampled": sampling is not None, "ended": ended}

    def _answer(self, example: Conversation, sampling: Sampling | None, chance: random.Random) -> Task:
        """Answers each turn of a conversation, after the target's own earlier answers."""
        history: list[dict[str, Any]] = []
        answered: dict[str, Any] = {}
        generations: list[Generation] = []
        for turn, message in enumerate(example.messages):
            if message["role"] != "assistant" or turn < example.first_trained:
                history.append(message)
                continue
            try:
                prompt = self._prompt(history, example.extras)
                answer, text = yield from self._ask(prompt, self.settings.max_length - len(prompt), sampling, chance)
            except MalformedRowError as error:
                if not generations:
                    raise
                answered["left_out"] = str(error)
                break
            history.append({"role": "assistant", "content": text})
            generations.append(answer)
            answered["messages"] = list(history)
        return answered | _columns(example.extras) | {"generations": generations}

    def _ask(
        self, prompt: list[int], room: int, sampling: Sampling | None, chance: random.Random
    ) -> Generator[Request, Completion, tuple[Generation, str]]:
        """Returns what the target writes after a prompt, and its text, or raises `MalformedRowError`."""
        if room < 1:
            raise MalformedRowError("there is no room for an answer within the maximum length")
        limit = min(self.settings.max_new_tokens, room)
        ids, ended = yield Request(prompt, limit, sampling, chance.getrandbits(31))
        if not ended and loops(ids):
            raise MalformedRowError("the answer ends in a loop")
        text = self.renderer.decode(ids[: -1 if ended else None])
        if not text:
            raise MalformedRowError("the target says nothing")
        return Generation(prompt, ids, ended), text

    def _prompt(self, history: list[dict[str, Any]], extras: Mapping[str, Any]) -> list[int]:
        try:
            return self.renderer.prompt(history, extras)
        except MalformedRowError:  # some templates want an answer without the marks around its reasoning
            said = [
                m | {"content": self.renderer.after_marks(m["content"])}
                if m["role"] == "assistant" and m["content"]
                else m
                for m in history
            ]
            return self.renderer.prompt(said, extras)

    def _continue(self, example: RawText, sampling: Sampling | None, chance: random.Random) -> Task:
        """Continues the prompt of a text, or without one its beginning."""
        room = self.settings.max_length // 2
        num_tokens = room if example.prompt else min(self.settings.num_prompt_tokens, room)
        prompt = encode_open_text(self.tokenizer, example.prompt or example.completion)[:num_tokens]
        answer, _ = yield from self._ask(prompt, self.settings.max_length - len(prompt), sampling, chance)
        new = answer.answer_ids[: -1 if answer.ended else None]
        if example.prompt:
            # With what is before it: a tokenizer may drop the first space of a text.
            before, text = self.renderer.decode(prompt), self.renderer.decode(prompt + new)
            return {"prompt": example.prompt, "completion": text.removeprefix(before), "generations": [answer]}
        special = set(self.tokenizer.all_special_ids)
        begun = list(dropwhile(special.__contains__, prompt))  # without what the tokenizer puts before it
        return {"text": self.renderer.decode(begun + new), "generations": [answer]}


def loops(ids: list[int]) -> bool:
    """Whether tokens end in a phrase that is said again and again."""
    tail = ids[-_LOOP_TOKENS:]
    phrases = range(1, _LONGEST_PHRASE + 1)
    return len(tail) == _LOOP_TOKENS and any(tail[size:] == tail[:-size] for size in phrases)


def _columns(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a row gives its template, in the columns in which it is read."""
    named = {name: extras[name] for name in ("tools", "documents") if name in extras}
    others = {name: value for name, value in extras.items() if name not in named}
    return named | ({"chat_template_kwargs": others} if others else {})
