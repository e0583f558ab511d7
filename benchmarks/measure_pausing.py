"""Measures what a drafter that does not fit costs, with nothing tuned: one of random weights beside plain decoding.

    python benchmarks/measure_pausing.py

Decoding in four ways takes turns on the same prompts, and each figure is the median of the ratios of a turn:

    random      the drafter, against plain decoding
    paused      the same, after it has drafted once, against plain decoding
    with        the drafter and prompt lookup, against prompt lookup while the drafter is paused
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from demo_pair import DemoPairArguments, parse
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_gumiho import GumihoModel
from transformers_gumiho.drafting import pause


SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "T=1": {"do_sample": True, "top_k": 0}}
LOOKUP = {"prompt_lookup_num_tokens": 10}


@dataclass
class PausingArguments(DemoPairArguments):
    rows: list[int] = field(default_factory=lambda: [1, 4])
    max_new_tokens: list[int] = field(default_factory=lambda: [128, 512])
    turns: int = field(default=6, metadata={"help": "Batches of prompts for each figure."})


def main(arguments: list[str] | None = None) -> None:
    args = parse(PausingArguments, __doc__, arguments)
    target = AutoModelForCausalLM.from_pretrained(args.demo_pair / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.demo_pair / "target", padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    torch.manual_seed(0)
    gumiho = GumihoModel.from_target(target).float()
    prompts = itertools.cycle(args.texts)
    print(f"{'rows':>4} {'tokens':>6} {'':6} {'random':>8} {'paused':>8} {'with':>8}")
    for rows, num_tokens, name in itertools.product(args.rows, args.max_new_tokens, SAMPLINGS):
        batches = [
            tokenizer(list(itertools.islice(prompts, rows)), return_tensors="pt", padding=True)
            for _ in range(args.turns)
        ]
        options = SAMPLINGS[name] | {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        ratios = measure(target, gumiho, batches, options)
        print(f"{rows:4} {num_tokens:6} {name:6} " + " ".join(f"{ratio:8.3f}" for ratio in ratios), flush=True)


def measure(target: Any, gumiho: GumihoModel, batches: list[Any], options: dict[str, Any]) -> list[float]:
    """Returns the three figures: speeds, as shares of that of what they are compared with."""

    def generate(batch: Any, **kwargs: Any) -> None:
        torch.manual_seed(0)
        target.generate(**batch, **options, **kwargs)

    def generate_paused(batch: Any, **kwargs: Any) -> None:
        with patch.object(pause, "FIRST_PAUSE", 1 << 30), patch.object(pause, "MAX_LOST", -1e9):
            generate(batch, assistant_model=gumiho, **kwargs)

    ways: list[Callable[[Any], None]] = [
        generate,
        lambda batch: generate(batch, assistant_model=gumiho),
        generate_paused,
        lambda batch: generate(batch, assistant_model=gumiho, **LOOKUP),
        lambda batch: generate_paused(batch, **LOOKUP),
    ]
    turns: list[list[float]] = []
    for turn, batch in enumerate(batches):
        seconds = [0.0] * len(ways)
        # Another one begins in each turn.
        for way in itertools.islice(itertools.cycle(range(len(ways))), turn, turn + len(ways)):
            begin = time.perf_counter()
            ways[way](batch)
            seconds[way] = time.perf_counter() - begin
        plain, random, paused, both, context = seconds
        turns.append([plain / random, plain / paused, context / both])
    return [statistics.median(figures) for figures in zip(*turns, strict=True)]


if __name__ == "__main__":
    main()
