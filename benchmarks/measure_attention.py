"""Measures what a cycle takes, and how much memory, with and without copies of grouped keys and values.

    python benchmarks/measure_attention.py

The target has ten layers in the shape of SmolLM2-135M (9 query heads on 3 of keys and values) and random weights, as
only time counts; its cache is filled with random numbers in place of a prompt, behind which both ways take turns,
round by round in one process. A cycle is what lies between the beginnings of two of the target's passes. On a CPU it
is counted in processor time, of which other processes take no part. Memory is measured in processes of their own,
beyond the models and the cache.
"""

import os
import statistics
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import DynamicCache, HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedModel, logging

from transformers_gumiho import GumihoModel
from transformers_gumiho.benchmarking.memory import peak_memory
from transformers_gumiho.decoding.observers import GenerationObserver, Stage, observing
from transformers_gumiho.internals import CACHE_NAME
from transformers_gumiho.measuring.timing import synchronize
from transformers_gumiho.model.decoding_settings import NEVER_PAUSES
from transformers_gumiho.target.grouped_attention import copying_groups


WAYS: dict[str, type[AbstractContextManager[None]]] = {"copied": copying_groups, "in_place": nullcontext}


@dataclass
class AttentionArguments:
    lengths: list[int] = field(default_factory=lambda: [1024, 4096, 16384], metadata={"help": "Tokens of context."})
    num_layers: int = field(default=10, metadata={"help": "Layers of the target."})
    num_heads: int = field(default=9, metadata={"help": "Query heads of the target, of 64 dimensions."})
    num_key_value_heads: int = field(default=3, metadata={"help": "Heads of its keys and values."})
    nodes: int = field(default=16, metadata={"help": "Drafted tokens of a tree."})
    cycles: int = field(default=6, metadata={"help": "New tokens of each generation; about as many cycles."})
    rounds: int = field(default=5, metadata={"help": "Rounds, of which the median counts."})
    dtype: str = field(default="float32", metadata={"help": "Precision of both models."})
    device: str = field(default="cpu", metadata={"help": "Where both models are."})
    memory_of: Literal["copied", "in_place"] | None = field(
        default=None, metadata={"help": "Only print the peak memory in MB at the first length, one way."}
    )


class CycleClock(GenerationObserver):
    """Takes note of when each of the target's passes begins: on a CPU in seconds of this process."""

    def __init__(self, device: torch.device):
        self.device = device
        self.begins: list[float] = []

    def on_stage_begin(self, stage: Stage) -> None:
        if stage == "verify":
            synchronize(self.device)
            self.begins.append(time.process_time() if self.device.type == "cpu" else time.perf_counter())

    @property
    def milliseconds(self) -> float:
        """The median of the cycles."""
        return 1e3 * statistics.median(b - a for a, b in zip(self.begins, self.begins[1:], strict=False))


def make_pair(args: AttentionArguments) -> tuple[PreTrainedModel, GumihoModel]:
    """Returns a target and a drafter with random weights."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=64 * args.num_heads, intermediate_size=1536, num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads, num_key_value_heads=args.num_key_value_heads, head_dim=64,
        max_position_embeddings=max(args.lengths) + 512, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(args.device):
        target = LlamaForCausalLM(config).to(getattr(torch, args.dtype)).eval()
        gumiho = GumihoModel.from_target(target).eval()
    gumiho.generation_config.update(num_assistant_tokens=args.nodes, branching_factor=4, break_even=NEVER_PAUSES)
    return target, gumiho


def filled_cache(target: PreTrainedModel, length: int) -> DynamicCache:
    """Returns a cache with random keys and values of `length` tokens."""
    config, cache = target.config, DynamicCache(config=target.config)
    shape = (1, config.num_key_value_heads, length, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.randn(shape, dtype=target.dtype, device=target.device) for _ in range(2)), layer)
    return cache


def decode(
    pair: tuple[PreTrainedModel, GumihoModel], cache: DynamicCache, way: str, args: AttentionArguments
) -> float:
    """Decodes behind the tokens of a cache; returns the milliseconds of a cycle."""
    target, gumiho = pair
    ids = torch.arange(cache.get_seq_length() + 1, device=target.device)[None] % 8000
    clock = CycleClock(target.device)
    with WAYS[way](), observing(clock):
        target.generate(
            ids, **{CACHE_NAME: cache}, max_new_tokens=args.cycles, do_sample=False, assistant_model=gumiho
        )
    return clock.milliseconds


def measure_memory(args: AttentionArguments, way: str) -> float:
    """Returns the most MB that a generation takes beyond the models and the cache."""
    pair = make_pair(args)
    decode(pair, filled_cache(pair[0], 63), way, args)
    cache = filled_cache(pair[0], args.lengths[0] - 1)
    with peak_memory(pair[0].device) as peak:
        decode(pair, cache, way, args)
    return (peak.num_bytes or 0) / 1e6


def memory_in_a_process(way: str, length: int) -> float:
    """Returns what a process of its own measures, in which glibc gives freed memory back at once."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory_of", way, "--lengths", str(length)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)


def report(length: int, times: dict[str, list[float]]) -> str:
    """Returns the row of the table for `length`, of the milliseconds of each way's rounds."""
    copied, in_place = (statistics.median(times[way]) for way in WAYS)
    ratio = statistics.median(a / b for a, b in zip(times["copied"], times["in_place"], strict=True))
    memory = " | ".join(f"{memory_in_a_process(way, length):.0f} MB" for way in WAYS)
    return f"| {length} | {copied:.1f} ms | {in_place:.1f} ms | {ratio:.2f}x | {memory} |"


def main() -> None:
    (args,) = HfArgumentParser(AttentionArguments, description=__doc__).parse_args_into_dataclasses()
    logging.disable_progress_bar()
    if args.memory_of is not None:
        print(f"{measure_memory(args, args.memory_of):.1f}")
        return
    pair = make_pair(args)
    print("| context | cycle, copied | in place | gain | peak memory, copied | in place |\n" + "|---" * 6 + "|")
    for length in args.lengths:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.rounds + 1):
            for way, taken in times.items():
                taken.append(decode(pair, filled_cache(pair[0], length - 1), way, args))
        print(report(length, {way: taken[1:] for way, taken in times.items()}), flush=True)  # the first one warms up


if __name__ == "__main__":
    main()
