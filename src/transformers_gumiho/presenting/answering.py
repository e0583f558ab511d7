"""Answering one prompt while it is read, and comparing two answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..model.modeling_gumiho import GumihoModel
from ..verification.placement import input_device
from .cycles import Cycle, watch_cycles
from .streaming import CycleStreamer, colored


@dataclass
class Answer:
    """
    An answer as it is written. One thread writes it, and others may read it.

    Attributes:
        tokens: The new tokens.
        pieces: Their text in pieces of complete characters, each with whether it holds accepted drafts alone.
        cycles: The verification cycles that made all tokens but the first, which is chosen after the prompt.
        seconds: From the prompt to the newest token.
        progress: Its state.
        problem: Why it failed.
    """

    tokens: list[int] = field(default_factory=list)
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    seconds: float = 0.0
    progress: Literal["queued", "generating", "done", "stopped", "failed"] = "queued"
    problem: str | None = None

    @property
    def tau(self) -> float | None:
        """The mean acceptance length: tokens per cycle, bonus tokens included. `None` without a cycle."""
        cycles = list(self.cycles)
        return sum(len(cycle.committed) for cycle in cycles) / len(cycles) if cycles else None

    def tokens_before(self, index: int) -> list[int]:
        """Returns the tokens before the cycle of this index."""
        return self.tokens[: 1 + sum(len(cycle.committed) for cycle in self.cycles[:index])]

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return len(self.tokens) / max(self.seconds, 1e-9)


def stream_answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: GumihoModel | None,
    prompt: Sequence[int],
    answer: Answer,
    *,
    max_new_tokens: int,
    temperature: float,
    on_piece: Callable[[str, bool], None] = lambda text, is_draft: None,
    on_step: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """
    Writes an answer to a prompt, and returns it. Ctrl-C, or another `KeyboardInterrupt` in `on_step`, ends it.

    Args:
        target: The target.
        tokenizer: Its tokenizer.
        drafter: The drafter; `None` decodes plainly.
        prompt: Token ids.
        answer: The answer to write.
        max_new_tokens: The most to generate.
        temperature: 0 is greedy; what else there is to sampling is in the target's `generation_config`.
        on_piece: Is called with each piece of the text, and whether it holds accepted drafts alone.
        on_step: Is called after each cycle; in plain decoding, after each token.
        clock: Returns seconds.
    """
    start = clock()

    def add_piece(text: str, is_draft: bool) -> None:
        if text:
            answer.pieces.append((text, is_draft))
            on_piece(text, is_draft)

    def note_step() -> None:
        answer.seconds = clock() - start
        on_step()

    def on_cycle(cycle: Cycle) -> None:
        answer.cycles.append(cycle)
        streamer.expect(cycle)

    streamer = CycleStreamer(tokenizer, add_piece, drafter is not None, note_step)
    answer.tokens, answer.progress = streamer.tokens, "generating"
    input_ids = torch.tensor([list(prompt)], device=input_device(target))
    with watch_cycles(on_cycle):
        try:
            target.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), assistant_model=drafter, streamer=streamer,
                max_new_tokens=max_new_tokens, **sampling_settings(temperature),
            )  # fmt: skip
            was_stopped = False
        except KeyboardInterrupt:
            streamer.end()
            was_stopped = True
    answer.seconds = clock() - start
    answer.progress = "stopped" if was_stopped else "done"  # last: who reads it may then read all else
    return answer


def sampling_settings(temperature: float) -> dict[str, Any]:
    """Returns the arguments of `generate()` for a temperature; 0 is greedy."""
    if temperature:
        return {"do_sample": True, "temperature": temperature}
    # What a greedy target's configuration says of sampling would only be warned about.
    return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def describe_answer(answer: Answer, colors: bool) -> str:
    """Returns the line below an answer: tau, speed and what it was made of."""
    num_accepted = sum(len(cycle.accepted) for cycle in answer.cycles)
    tau = "no cycles" if answer.tau is None else f"tau {answer.tau:.2f}"
    parts = [
        tau,
        f"{answer.speed:.1f} tokens/s",
        f"{len(answer.cycles)} cycles",
        f"{len(answer.tokens)} tokens, {colored(f'{num_accepted} accepted drafts', colors)}",
    ]
    if answer.progress != "done":
        parts.append("interrupted")
    return f"[{' | '.join(parts)}]"


def first_difference(answer: Answer, plain: Answer) -> int | None:
    """Returns the index of the first token that differs, among those that both answers have; `None` for none."""
    pairs = zip(list(answer.tokens), list(plain.tokens), strict=False)
    return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


@torch.inference_mode()
def logit_gap(target: PreTrainedModel, prompt: Sequence[int], answer: Answer, plain: Answer) -> float | None:
    """
    Returns how far apart the target's logits are for the two tokens in which answers to a prompt first differ, `None`
    where there are no two.
    """
    place = first_difference(answer, plain)
    if place is None:
        return None
    text = torch.tensor([[*prompt, *plain.tokens[:place]]], device=input_device(target))
    logits = target(text, use_cache=False).logits[0, -1].float()
    return abs(float(logits[answer.tokens[place]] - logits[plain.tokens[place]]))


def describe_comparison(answer: Answer, plain: Answer, dtype: torch.dtype, gap: float | None = None) -> str:
    """
    Returns the lines below plain decoding's answer: its speed, the speed-up, and whether both texts are the same.
    `dtype` is that of the target, and `gap` the [`logit_gap`] of greedy answers.
    """
    speed = f"[plain decoding | {plain.speed:.1f} tokens/s | {len(plain.tokens)} tokens"
    if plain.progress != "done":
        return f"{speed} | interrupted, so not compared]"
    speed_up = f"{speed}]\nSpeed-up {answer.speed / plain.speed:.2f}x"
    place = first_difference(answer, plain)
    if place is None and len(answer.tokens) != len(plain.tokens):
        place = min(len(answer.tokens), len(plain.tokens))
    if place is None:
        return f"{speed_up}, same text"
    difference = f"{speed_up}. The texts differ from token {place + 1} on"
    apart = "" if gap is None else f" (two logits {gap:.2g} apart)"
    if dtype.itemsize > 2:
        return difference + apart
    return f"{difference}: a near-tie in {str(dtype).removeprefix('torch.')}{apart}; --dtype float32 avoids it"
