"""Answering one prompt while it is read, and comparing two answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ...generation.verification.traits import input_device
from ...model.modeling_gumiho import GumihoModel
from .cycles import CONTEXT, INCOMPLETE, Cycle, watch_cycles


Source = Literal["draft", "pause", "target"]


class Piece(NamedTuple):
    """
    A piece of an answer, in complete characters. Its `source` is "draft" if it holds accepted drafts alone, and
    "pause" for what the target wrote while the drafter paused.
    """

    text: str
    source: Source


@dataclass
class Answer(BaseStreamer):
    """
    An answer as it is written: its new `tokens`. One thread writes it, and others may read it.

    Attributes:
        pieces: Their text. A character that needs a token of the target's own is no accepted draft.
        cycles: The verification cycles that made all tokens but the first, which is chosen after the prompt.
        seconds: From the prompt to the newest token, without `waited`.
        waited: Seconds in which other answers had the models.
        progress: Its state; if it failed, `problem` says why.
        on_step: Called after each cycle, and after each token that is in none. A `KeyboardInterrupt` ends the answer.
    """

    tokens: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    seconds: float = 0.0
    waited: float = 0.0
    progress: Literal["queued", "generating", "done", "stopped", "failed"] = "queued"
    problem: str | None = None
    on_step: Callable[[], None] = field(default_factory=lambda: lambda: None)

    @property
    def tau(self) -> float | None:
        """Tokens per drafted cycle, bonus tokens included. `None` without one."""
        return _tokens_per_cycle([cycle for cycle in list(self.cycles) if cycle.origin.source == "drafter"])

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens per pass of the target after the prefill, also of passes without drafts."""
        return _tokens_per_cycle(list(self.cycles))

    @property
    def num_paused(self) -> int:
        """Cycles in which the drafter was paused."""
        return sum(cycle.is_paused for cycle in list(self.cycles))

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return len(self.tokens) / max(self.seconds, 1e-9)

    def tokens_before(self, index: int) -> list[int]:
        """Returns the tokens before the cycle of this index."""
        return self.tokens[: 1 + sum(len(cycle.committed) for cycle in self.cycles[:index])]

    def begin(self, tokenizer: PreTrainedTokenizerBase, has_cycles: bool) -> None:
        """Begins the clock; `tokenizer` decodes. Tokens that come in cycles (`has_cycles`) end with `end_cycle`."""
        self._tokenizer, self._has_cycles, self._start = tokenizer, has_cycles, time.perf_counter()
        self._num_written = 0
        self._context: list[int] | None = None  # of the piece to come; none before the prompt
        self._piece: list[tuple[int, Source]] = []
        self.progress = "generating"

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt `(1, T)` in the first call, and a new token `(1,)` in every other call."""
        if self._context is None:
            self._context = value[0, -CONTEXT:].tolist()
            return
        self.tokens.append(int(value))
        if not self._has_cycles or len(self.tokens) == 1:  # the first token is chosen after the prompt
            self._write()
            self.on_step()

    def end_cycle(self, cycle: Cycle) -> None:
        """Takes the cycle whose tokens have come."""
        self.cycles.append(cycle)
        self._write(len(cycle.accepted), "pause" if cycle.is_paused else "target")
        self.on_step()

    def end(self) -> None:
        """Hands on the end of a text that ends within a character or, interrupted, within a cycle."""
        self._write()
        self._hand_on(is_last=True)

    def _write(self, num_drafts: int = 0, source: Source = "target") -> None:
        """Hands on the tokens that have come. The first ones are accepted drafts; the others come from `source`."""
        for index, token in enumerate(self.tokens[self._num_written :]):
            self._piece.append((token, "draft" if index < num_drafts else source))
            self._hand_on()
        self._num_written = len(self.tokens)
        self.seconds = time.perf_counter() - self._start - self.waited

    def _hand_on(self, is_last: bool = False) -> None:
        context, piece = self._context or [], [token for token, _ in self._piece]
        text = self._decode(context + piece)
        if text.endswith(INCOMPLETE) and not is_last:
            return
        # A prompt may end within a character, which is then written completely.
        if text := text[len(self._decode(context).rstrip(INCOMPLETE)) :]:
            sources = {source for _, source in self._piece}
            self.pieces.append(Piece(text, sources.pop() if len(sources) == 1 else "target"))
        self._context, self._piece = (context + piece)[-CONTEXT:], []

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _tokens_per_cycle(cycles: Sequence[Cycle]) -> float | None:
    return sum(len(cycle.committed) for cycle in cycles) / len(cycles) if cycles else None


def stream_answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: GumihoModel | None,
    prompt: Sequence[int],
    answer: Answer,
    *,
    max_new_tokens: int,
    temperature: float,
) -> Answer:
    """
    Writes the answer of a `target`, with its `tokenizer`, to a prompt of token ids, and returns it. It has up to
    `max_new_tokens`. Without a `drafter`, plain decoding answers. A `temperature` of 0 is greedy. Ctrl-C ends it.
    """
    # What a greedy target's configuration says of sampling would only be warned about.
    greedy: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    sampling = {"do_sample": True, "temperature": temperature} if temperature else greedy
    input_ids = torch.tensor([list(prompt)], device=input_device(target))
    is_stopped = False
    answer.begin(tokenizer, has_cycles=drafter is not None)
    with watch_cycles(answer.end_cycle):
        try:
            target.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), assistant_model=drafter, streamer=answer,
                max_new_tokens=max_new_tokens, **sampling,
            )  # fmt: skip
        except KeyboardInterrupt:
            answer.end()
            is_stopped = True
    answer.progress = "stopped" if is_stopped else "done"  # last: who reads it may then read all else
    return answer


def first_difference(answer: Answer, plain: Answer) -> int | None:
    """Returns the index of the first token in which two answers differ; what is still to come is no difference."""
    # Before the tokens are read, which may be written meanwhile.
    are_done = answer.progress == plain.progress == "done"
    ours, theirs = list(answer.tokens), list(plain.tokens)
    pairs = enumerate(zip_longest(ours, theirs) if are_done else zip(ours, theirs, strict=False))
    return next((index for index, (our, their) in pairs if our != their), None)


@torch.inference_mode()
def logit_gap(target: PreTrainedModel, prompt: Sequence[int], answer: Answer, plain: Answer) -> float | None:
    """Returns how far apart the target's logits of the first two tokens are in which answers to a prompt differ."""
    place = first_difference(answer, plain)
    if place is None or place >= min(len(answer.tokens), len(plain.tokens)):
        return None
    text = torch.tensor([[*prompt, *plain.tokens[:place]]], device=input_device(target))
    logits = target(text, use_cache=False).logits[0, -1].float()
    return abs(float(logits[answer.tokens[place]] - logits[plain.tokens[place]]))
