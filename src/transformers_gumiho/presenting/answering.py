"""Answering one prompt while it is read."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..model.modeling_gumiho import GumihoModel
from .colors import colored
from .cycles import Cycle, watch_cycles
from .streaming import CycleStreamer


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        tokens: The new tokens.
        cycles: The verification cycles that made all of them but the first, which is chosen after the prompt.
        seconds: From the prompt to the last token.
        is_complete: Whether it ended without an interruption.
    """

    tokens: tuple[int, ...]
    cycles: tuple[Cycle, ...]
    seconds: float
    is_complete: bool

    @property
    def tau(self) -> float | None:
        """The mean acceptance length: tokens per cycle, bonus tokens included. `None` without a cycle."""
        return sum(len(cycle.committed) for cycle in self.cycles) / len(self.cycles) if self.cycles else None

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return len(self.tokens) / self.seconds


def stream_answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: GumihoModel | None,
    prompt: Sequence[int],
    stream: TextIO,
    *,
    colors: bool,
    max_new_tokens: int,
    temperature: float,
    prompt_lookup_num_tokens: int | None = None,
) -> Answer:
    """
    Writes the answer to a prompt as it is decoded. Ctrl-C ends it.

    Args:
        target: The target.
        tokenizer: Its tokenizer.
        drafter: The drafter; `None` decodes plainly.
        prompt: Token ids.
        stream: Where the answer goes.
        colors: Whether to color accepted drafts.
        max_new_tokens: The most to generate.
        temperature: 0 is greedy; what else there is to sampling is in the target's `generation_config`.
        prompt_lookup_num_tokens: Tokens that are drafted from the context, at most, next to the drafter's; 0 for none.
            By default the drafter's setting.
    """
    cycles: list[Cycle] = []
    streamer = CycleStreamer(tokenizer, stream, colors, has_cycles=drafter is not None)

    def on_cycle(cycle: Cycle) -> None:
        cycles.append(cycle)
        streamer.expect(cycle)

    lookup = {} if drafter is None else {"prompt_lookup_num_tokens": prompt_lookup_num_tokens}
    input_ids = torch.tensor([list(prompt)], device=target.device)
    is_complete, start = True, time.perf_counter()
    with watch_cycles(on_cycle):
        try:
            target.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), assistant_model=drafter, streamer=streamer,
                max_new_tokens=max_new_tokens, **lookup, **sampling_settings(temperature),
            )  # fmt: skip
        except KeyboardInterrupt:
            is_complete = False
            streamer.end()
    return Answer(tuple(streamer.tokens), tuple(cycles), time.perf_counter() - start, is_complete)


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
    if not answer.is_complete:
        parts.append("interrupted")
    return f"[{' | '.join(parts)}]"


def first_difference(answer: Answer, plain: Answer) -> int | None:
    """Returns the index of the first token in which two answers differ, `None` where they do not."""
    pairs = itertools.zip_longest(answer.tokens, plain.tokens)
    return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


@torch.inference_mode()
def logit_gap(target: PreTrainedModel, prompt: Sequence[int], answer: Answer, plain: Answer) -> float | None:
    """
    Returns how far apart the target's logits are for the two tokens in which answers to a prompt first differ, `None`
    where there are no two.
    """
    place = first_difference(answer, plain)
    if place is None or place >= min(len(answer.tokens), len(plain.tokens)):
        return None
    text = torch.tensor([[*prompt, *plain.tokens[:place]]], device=target.device)
    logits = target(text, use_cache=False).logits[0, -1].float()
    return abs(float(logits[answer.tokens[place]] - logits[plain.tokens[place]]))


def describe_comparison(answer: Answer, plain: Answer, dtype: torch.dtype, gap: float | None = None) -> str:
    """
    Returns the lines below plain decoding's answer: its speed, the speed-up, and whether both texts are the same.

    Args:
        answer: The answer with the drafter.
        plain: The answer to the same prompt without it.
        dtype: The target's precision.
        gap: The [`logit_gap`] of two greedy answers.
    """
    speed = f"[plain decoding | {plain.speed:.1f} tokens/s | {len(plain.tokens)} tokens"
    if not plain.is_complete:
        return f"{speed} | interrupted, so not compared]"
    speed_up = f"{speed}]\nSpeed-up {answer.speed / plain.speed:.2f}x"
    place = first_difference(answer, plain)
    if place is None:
        return f"{speed_up}, same text"
    difference = f"{speed_up}. The texts differ from token {place + 1} on"
    apart = "" if gap is None else f" (two logits {gap:.2g} apart)"
    if dtype.itemsize > 2:
        return difference + apart
    return f"{difference}: a near-tie in {str(dtype).removeprefix('torch.')}{apart}; --dtype float32 avoids it"
