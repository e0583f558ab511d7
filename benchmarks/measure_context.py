"""Measures how the time of a cycle and the memory of a generation grow with the context.

    python benchmarks/measure_context.py

Plain decoding and decoding with the drafter take turns after contexts of several lengths, round by round, in several
processes: a machine that slows down for a while slows down all of a round, and processes differ by where their memory
lies. What has grown is divided by what the first length took in the same round. A cycle should grow no faster than a
step of plain decoding does. Memory is measured in processes of their own, as one that has freed memory keeps it.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from demo_pair import DemoPairArguments, parse
from transformers import PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.model.decoding_settings import NEVER_PAUSES
from transformers_gumiho.tools.measuring.machine import watch_memory
from transformers_gumiho.tools.measuring.timing import stage_timer, time_decoding
from transformers_gumiho.tools.pairs import PairArguments, load_pair


# The rounds: for each length, the milliseconds of a plain step, of a cycle, and of the target's pass in it.
Times = list[list[list[float]]]


@dataclass
class ContextArguments(DemoPairArguments):
    lengths: list[int] = field(default_factory=lambda: [128, 1024, 4096], metadata={"help": "Tokens of context."})
    max_new_tokens: int = 96
    rounds: int = field(default=6, metadata={"help": "Rounds in each process."})
    processes: int = field(default=4, metadata={"help": "Processes to measure times in, one after the other."})
    part: Literal["times", "plain", "drafted"] | None = field(
        default=None,
        metadata={
            "help": "Only print what one process measures: `times` of all rounds in JSON, or the peak memory in MB at "
            "the first length, `plain` or `drafted`."
        },
    )


def load(args: ContextArguments) -> tuple[PreTrainedModel, GumihoModel, torch.Tensor]:
    """Returns the pair and the token ids of a long text."""
    target, tokenizer, gumiho = load_pair(PairArguments(**args.folders, dtype="float32"))
    gumiho.generation_config.break_even = NEVER_PAUSES
    text = torch.tensor(tokenizer("\n".join(args.texts), verbose=False)["input_ids"])
    return target, gumiho, text.repeat(-(-max(args.lengths) // len(text)))


def measure_memory(args: ContextArguments) -> None:
    """Prints the most memory that a generation takes, beyond the loaded models."""
    target, gumiho, text = load(args)
    assistant = {"assistant_model": gumiho} if args.part == "drafted" else {}
    read_peak = watch_memory(target.device)
    target.generate(text[None, : args.lengths[0]], max_new_tokens=args.max_new_tokens, do_sample=False, **assistant)
    print(f"{(read_peak() or 0) / 1e6:.1f}")


def measure_times(target: PreTrainedModel, gumiho: GumihoModel, text: torch.Tensor, args: ContextArguments) -> Times:
    """Returns the milliseconds of a plain step, of a cycle, and of the target's pass in it, at each length."""
    generation = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    rounds = []
    for _ in range(args.rounds + 1):
        of_lengths = []
        for length in args.lengths:
            inputs = {"input_ids": text[None, :length], "attention_mask": torch.ones(1, length, dtype=torch.long)}
            step = time_decoding(target, inputs, **generation).pass_seconds
            with stage_timer(target.device) as taken:
                target.generate(**inputs, assistant_model=gumiho, **generation)
            stages = taken.stages()
            cycle = (taken.total - stages["prompt"]) / taken.num_cycles
            of_lengths.append([1e3 * seconds for seconds in (step, cycle, stages["verify"] / taken.num_cycles)])
        rounds.append(of_lengths)
    return rounds[1:]  # the first one warms up


def run_part(part: str, *options: str, **environment: str) -> str:
    """Returns what a process of its own prints."""
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part, *options]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment).stdout


def memory_of(part: str, length: int) -> float:
    """Returns the peak memory in MB of a generation after `length` tokens, `plain` or `drafted`."""
    # glibc gives freed memory back at once then. Otherwise it keeps what it thinks it will need, and the same
    # generation takes from 180 to 300 MB.
    return float(run_part(part, "--lengths", str(length), MALLOC_MMAP_THRESHOLD_="65536"))


def in_quartiles(values: Iterable[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.2f}x ({low:.2f}-{high:.2f})"


def report(length: int, times: Times, index: int) -> str:
    """Returns the row of the table for the length at `index`."""
    step, cycle, verify = (statistics.median(values) for values in zip(*(row[index] for row in times), strict=True))
    growth = [[now / first for now, first in zip(row[index], row[0], strict=True)] for row in times]
    steps, cycles, _ = zip(*growth, strict=True)
    plain, drafted = (memory_of(part, length) for part in ("plain", "drafted"))
    return (
        f"| {length} | {step:.2f} ms | {cycle:.2f} ms | {verify:.2f} ms | {in_quartiles(steps)} | "
        f"{in_quartiles(cycles)} | {in_quartiles(c / s for s, c in zip(steps, cycles, strict=True))} | "
        f"{plain:.0f} MB | {drafted:.0f} MB ({drafted / plain:.2f}x) |"
    )


def main() -> None:
    args = parse(ContextArguments, __doc__)
    if args.part == "times":
        print(json.dumps(measure_times(*load(args), args)))
    elif args.part is not None:
        measure_memory(args)
    elif args.rounds * args.processes < 2:
        raise SystemExit("Quartiles need at least two rounds: give more --rounds or --processes.")
    else:
        times = [row for _ in range(args.processes) for row in json.loads(run_part("times"))]
        columns = ("context", "plain step", "cycle", "of it the target", "step grows", "cycle grows", "cycle / step")
        print("| " + " | ".join((*columns, "peak memory plain", "with Gumiho")) + " |\n" + "|---" * 9 + "|")
        for index, length in enumerate(args.lengths):
            print(report(length, times, index), flush=True)


if __name__ == "__main__":
    main()
