"""Measures how the time of a cycle and the memory of a generation grow with the context.

    python examples/measure_context.py

After contexts of several lengths plain decoding and decoding with the drafter take turns. A cycle should grow no
faster than a step of plain decoding does. Memory is measured in processes of their own, as one that has freed memory
keeps it.
"""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel, logging

from transformers_gumiho import GumihoModel
from transformers_gumiho.benchmarking.memory import peak_memory
from transformers_gumiho.tuning.timing import time_drafted, time_plain


@dataclass
class ContextArguments:
    demo_pair: Path = field(
        default=Path(__file__).parent / "demo_pair", metadata={"help": "Folder with `target`, `gumiho` and prompts."}
    )
    lengths: list[int] = field(default_factory=lambda: [128, 1024, 4096], metadata={"help": "Tokens of context."})
    max_new_tokens: int = 48
    repeats: int = 5
    memory: str | None = field(
        default=None, metadata={"help": "Only print the peak memory in MB, `plain` or `drafted`, at the first length."}
    )


def load(args: ContextArguments) -> tuple[PreTrainedModel, GumihoModel, torch.Tensor]:
    """Returns the pair and the token ids of a long text."""
    target = AutoModelForCausalLM.from_pretrained(args.demo_pair / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.demo_pair / "target")
    gumiho = GumihoModel.from_pretrained(args.demo_pair / "gumiho", dtype=torch.float32)
    lines = (args.demo_pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    text = torch.tensor(tokenizer("\n".join(json.loads(line)["text"] for line in lines))["input_ids"])
    return target, gumiho, text.repeat(-(-max(args.lengths) // len(text)))


def measure_memory(args: ContextArguments) -> None:
    """Prints the most memory that a generation takes, beyond the loaded models."""
    target, gumiho, text = load(args)
    assistant = {"assistant_model": gumiho} if args.memory == "drafted" else {}
    with peak_memory(target.device) as peak:
        target.generate(
            text[None, : args.lengths[0]], max_new_tokens=args.max_new_tokens, do_sample=False, **assistant
        )
    print(f"{(peak.num_bytes or 0) / 1e6:.1f}")


def measure_in_process(length: int, way: str) -> float:
    """Returns the peak memory in MB of a generation `plain` or `drafted` after a context of `length` tokens."""
    command = [sys.executable, __file__, *sys.argv[1:], "--lengths", str(length), "--memory", way]
    # glibc gives freed memory back at once then. Otherwise it keeps what it thinks it will need, and the same
    # generation takes from 180 to 300 MB.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def measure_milliseconds(
    target: PreTrainedModel, gumiho: GumihoModel, ids: torch.Tensor, args: ContextArguments
) -> tuple[float, float, float]:
    """Returns the medians of a plain step, of a cycle, and of the target's pass in it."""
    generation = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    measured = []
    for repeat in range(args.repeats + 1):
        step = time_plain(target, ids, **generation)
        drafted = time_drafted(target, gumiho, ids, {}, split=True, **generation)
        if repeat:  # the first one warms up
            measured.append((step.seconds / step.num_tokens, drafted.cycle_seconds, drafted.verify_seconds))
    step_ms, cycle_ms, verify_ms = (1e3 * statistics.median(values) for values in zip(*measured, strict=True))
    return step_ms, cycle_ms, verify_ms


def main() -> None:
    (args,) = HfArgumentParser(ContextArguments).parse_args_into_dataclasses()
    logging.disable_progress_bar()
    if args.memory is not None:
        measure_memory(args)
        return
    target, gumiho, text = load(args)
    print("| context | plain step | cycle | of it the target | peak memory plain | with Gumiho |\n" + "|---" * 6 + "|")
    first: tuple[float, float] | None = None
    for length in args.lengths:
        step, cycle, verify = measure_milliseconds(target, gumiho, text[None, :length], args)
        first = first or (step, cycle)
        plain, drafted = (measure_in_process(length, way) for way in ("plain", "drafted"))
        print(
            f"| {length} | {step:.2f} ms ({step / first[0]:.2f}x) | {cycle:.2f} ms ({cycle / first[1]:.2f}x) | "
            f"{verify:.2f} ms | {plain:.0f} MB | {drafted:.0f} MB ({drafted / plain:.2f}x) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
