"""What a terminal shows: colored text, the lines below an answer, and a draft tree."""

import os
from collections.abc import Callable
from typing import TextIO

import torch

from .answering import Answer, first_difference
from .cycles import Cycle, CycleLabels


_GREEN, _RESET = "\033[32m", "\033[0m"
_LEGEND = """\
token: the probability of the token after the tokens above it, at the draft temperature
path: the probability of all tokens down to it, by which the nodes were chosen
* accepted draft   + bonus token, which the target chose"""
_ORIGINS = {
    "drafter": "drafted by the drafter",
    "pause": "the drafter is paused for {} more cycles",
    "end": "one token is missing, so nothing is drafted",
}


def wants_colors(stream: TextIO) -> bool:
    """Whether to write colors to `stream`: to a terminal, as https://no-color.org says."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colored(text: str, wanted: bool = True) -> str:
    """Returns `text` in the color of accepted drafts."""
    return f"{_GREEN}{text}{_RESET}" if wanted and text else text


def write_new_pieces(answer: Answer, stream: TextIO, colors: bool) -> Callable[[], None]:
    """Returns a function that writes what is new of an answer to `stream`."""
    num_written = 0

    def write() -> None:
        nonlocal num_written
        for piece in answer.pieces[num_written:]:
            stream.write(colored(piece.text, colors and piece.source == "draft"))
        num_written = len(answer.pieces)
        stream.flush()

    return write


def describe_passes(answer: Answer, colors: bool = False) -> str:
    """Returns tau, tokens per pass, and what an answer was made of."""
    if answer.tokens_per_pass is None:
        return f"{len(answer.tokens)} tokens, no passes after the prompt's"
    num_accepted = sum(len(cycle.accepted) for cycle in answer.cycles)
    parts = [
        "nothing drafted" if answer.tau is None else f"tau {answer.tau:.2f}",
        f"{answer.tokens_per_pass:.2f} tokens per pass",
        f"{len(answer.tokens)} tokens, {colored(f'{num_accepted} accepted drafts', colors)}",
        f"{len(answer.cycles)} passes" + (f", {answer.num_paused} of them paused" if answer.num_paused else ""),
    ]
    return " | ".join(parts)


def describe_answer(answer: Answer, dtype: torch.dtype, colors: bool) -> str:
    """Returns the lines below an answer."""
    parts = [describe_passes(answer, colors), f"{answer.speed:.1f} tokens/s", _name_of(dtype)]
    if answer.progress != "done":
        parts.append("interrupted")
    line = f"[{' | '.join(parts)}]"
    if not answer.num_paused:
        return line
    (break_even, *_) = [cycle.origin.break_even or 1.0 for cycle in answer.cycles if cycle.is_paused]
    return (
        f"{line}\n[The drafter was paused in {answer.num_paused} of {len(answer.cycles)} passes: drafting costs "
        f"{break_even - 1:.1f} steps of plain decoding here, so a pass must commit {break_even:.1f} tokens. "
        f"--break_even 1 never pauses.]"
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe_comparison(answer: Answer, plain: Answer, dtype: torch.dtype, gap: float | None = None) -> str:
    """Returns the lines below plain decoding's answer. `gap` is the [`logit_gap`] of greedy answers."""
    speed = f"[plain decoding | {plain.speed:.1f} tokens/s | {len(plain.tokens)} tokens"
    if plain.progress != "done":
        return f"{speed} | interrupted, so not compared]"
    speed_up = f"{speed}]\nSpeed-up {answer.speed / plain.speed:.2f}x"
    if (place := first_difference(answer, plain)) is None:
        return f"{speed_up}, same text"
    difference = f"{speed_up}. The texts differ from token {place + 1} on"
    apart = "" if gap is None else f" (two logits {gap:.2g} apart)"
    if dtype.itemsize > 2:
        return difference + apart
    return f"{difference}: a near-tie in {_name_of(dtype)}{apart}; --dtype float32 avoids it"


def draw_in_terminal(cycle: Cycle, labels: CycleLabels, *, colors: bool) -> str:
    """Returns the draft tree of a cycle, a line for each node."""
    lines = [
        f"after {labels.context}",
        "",
        " token   path",
        f"{'':16}{labels.nodes[0]}  (the newest committed token)",
        *_draw_children(cycle, labels, 0, "", colors),
        "",
        _LEGEND,
        "",
        cycle.summary,
        _ORIGINS[cycle.origin.source].format(cycle.origin.num_left),
    ]
    return "\n".join(lines)


def _draw_children(cycle: Cycle, labels: CycleLabels, node: int, indent: str, colors: bool) -> list[str]:
    """Returns the lines below `node`, whose own line begins its children's branches at `indent`."""
    children = cycle.children(node)
    lines = []
    for child in children:
        label = labels.nodes[child]
        is_last = child == children[-1]
        is_accepted = child in cycle.accepted
        branch = f"{indent}{'└' if is_last else '├'}─ "
        if child == len(cycle.tokens):
            lines.append(f"{'':13} + {branch}{label}")
            continue
        numbers = f"{cycle.token_probability(child):6.3f} {cycle.path_probability(child):6.3f}"
        mark = colored("*", colors) if is_accepted else " "
        lines.append(f"{numbers} {mark} {branch}{colored(label, colors and is_accepted)}")
        lines += _draw_children(cycle, labels, child, indent + ("   " if is_last else "│  "), colors)
    return lines
