"""Measures a GPU in one command and at most ten minutes, without a network.

    python benchmarks/gpu_check.py                 # the shape of Llama-3-8B, on a GPU with 80 GB
    python benchmarks/gpu_check.py --toy           # the same code at a toy size, also on a CPU

It times cycles in the shape of Llama-3-8B with random weights, eager and compiled, in each way of attention, next to
the bound that reading weights sets; trains a few steps; decodes with both shipped pairs, with and without the drafter;
and runs the tests that need a GPU. It prints one table; the file of JSON grows with each section. A section that could
not run is printed as not run, with the reason.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import measure_shape
import torch
import transformers
from demo_pair import parse
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from transformers_gumiho import GumihoModel
from transformers_gumiho.tools.benchmarking import DecodingMode, read_prompts, run_benchmark, summarize
from transformers_gumiho.tools.benchmarking.command import machine_name
from transformers_gumiho.tools.measuring.timing import synchronize
from transformers_gumiho.tools.pairs import PairArguments, find_drafter, load_pair
from transformers_gumiho.training import GumihoTrainer, GumihoTrainingArguments


ROOT = Path(__file__).parent.parent
Rows = Iterator[tuple[str, str]]


@dataclass
class CheckArguments:
    toy: bool = field(default=False, metadata={"help": "Small models and few repeats, to check this program."})
    json: Path = field(default=Path("gpu_check.json"), metadata={"help": "Where to write the table as JSON."})
    minutes: float = field(default=8.0, metadata={"help": "No section begins after this time."})


class NotRun(Exception):
    """Why a section did not run."""


class StepClock(TrainerCallback):
    """Times each step of a training; `seconds` has them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize(args.device)
        self.seconds.append(time.perf_counter() - self._start)


class GpuCheck:
    """The sections, what matters most first. Each yields rows of what was measured, or raises [`NotRun`]."""

    def __init__(self, is_toy: bool):
        self.is_toy = is_toy
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.shape = measure_shape.ShapeArguments(nodes=[63], context=512, repeats=2, device=self.device.type)
        if is_toy:
            self.shape = measure_shape.ShapeArguments(
                assistant=str(ROOT / "examples" / "demo_pair" / "gumiho"), num_layers=2, nodes=[7], context=8,
                max_new_tokens=8, repeats=1, dtype="float32", device=self.device.type,
            )  # fmt: skip

    @property
    def sections(self) -> dict[str, Callable[[], Rows]]:
        return {
            "shape, eager": lambda: self.time_shape(compiled=False),
            "shape, compiled": lambda: self.time_shape(compiled=True),
            "training": self.train,
            "pair smollm2": lambda: self.time_pair("smollm2"),
            "pair demo": lambda: self.time_pair("demo"),
            "GPU tests": self.run_tests,
        }

    @cached_property
    def pair(self) -> tuple[PreTrainedModel, GumihoModel]:
        if self.device.type == "cpu" and not self.is_toy:
            raise NotRun("no GPU")
        return measure_shape.make_pair(self.shape)

    def run_tests(self) -> Rows:
        if self.device.type == "cpu":
            raise NotRun("no GPU")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        yield "pytest -m gpu", process.stdout.strip().splitlines()[-1]

    def time_shape(self, compiled: bool) -> Rows:
        if compiled and self.device.type == "cpu":
            raise NotRun("a CPU compiles for minutes")
        (target, gumiho), ways = self.pair, tuple(measure_shape.WAYS)
        self.shape.compile = compiled
        of_target, of_drafter = measure_shape.bytes_read(target, gumiho)
        step, cycles = measure_shape.measure(target, gumiho, self.shape, ways)
        yield "plain step", f"{1e3 * step:.2f} ms"
        yield "bound of a cycle by weights read", f"{1 + of_drafter / of_target:.2f} plain steps"
        for size, seconds_of_ways in cycles.items():
            for way, seconds in zip(ways, seconds_of_ways, strict=True):
                yield f"cycle of {size} nodes, {way}", f"{1e3 * seconds:.2f} ms, {seconds / step:.2f} plain steps"

    def train(self) -> Rows:
        target, gumiho = self.pair
        num_steps, length = (3, 32) if self.is_toy else (6, 2048)
        vocab_size = target.get_output_embeddings().out_features
        ids = torch.randint(vocab_size, (num_steps, length), generator=torch.Generator().manual_seed(0))
        rows = [{"input_ids": row, "loss_mask": [1] * length} for row in ids.tolist()]
        is_gpu = self.device.type == "cuda"
        if is_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with tempfile.TemporaryDirectory() as folder:
            args = GumihoTrainingArguments(
                output_dir=folder, max_steps=num_steps, per_device_train_batch_size=1, save_strategy="no",
                report_to="none", logging_strategy="no", disable_tqdm=True, use_cpu=self.device.type == "cpu",
            )  # fmt: skip
            clock = StepClock()
            trainer = GumihoTrainer(gumiho.float(), args, target=target, train_dataset=rows, callbacks=[clock])
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        gumiho.to(target.dtype)
        yield f"rows of {length} tokens, float32", f"{length / statistics.mean(clock.seconds[1:]):.0f} tokens/s"
        if is_gpu:
            yield "peak memory beyond what was loaded", f"{(torch.cuda.max_memory_allocated() - before) / 1e9:.2f} GB"

    def time_pair(self, name: str) -> Rows:
        if self.is_toy and name != "demo":
            raise NotRun("too large for a toy")
        self.__dict__.pop("pair", None)  # frees the larger models
        try:
            target, tokenizer, gumiho = load_pair(PairArguments(pair=name, dtype="float32"))
        except (ImportError, OSError) as error:
            raise NotRun(str(error)) from error
        path = Path(find_drafter(name)).with_name("prompts.jsonl")
        questions = read_prompts(str(path), num_prompts=1 if self.is_toy else 8)
        modes = [DecodingMode("plain"), DecodingMode("gumiho", {"assistant_model": gumiho})]
        num_tokens = 16 if self.is_toy else 128
        row = summarize(list(run_benchmark(target, tokenizer, questions, modes, max_new_tokens=num_tokens)))[1]
        yield "speed-up over plain, float32", f"{row.speedup:.2f}"
        yield "tokens per cycle", f"{row.tau_micro:.2f}"
        yield "equal to plain", f"{row.num_equal} of {row.num_samples}"


def run(section: Callable[[], Rows], is_late: bool) -> list[tuple[str, str]]:
    """Returns the rows of a section, or one that says why it did not run."""
    if is_late:
        return [("not run", "no time left")]
    try:
        return list(section())
    except NotRun as reason:
        return [("not run", str(reason))]
    except Exception as error:  # what is measured next does not depend on it
        return [("not run", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")]


def main() -> None:
    args = parse(CheckArguments, __doc__)
    start, check = time.perf_counter(), GpuCheck(args.toy)
    machine = f"{machine_name(check.device)}, torch {torch.__version__}, transformers {transformers.__version__}"
    found: dict[str, dict[str, str]] = {}
    for name, section in check.sections.items():
        print(f"{name} ...", file=sys.stderr)
        found[name] = dict(run(section, time.perf_counter() - start > 60 * args.minutes))
        # After each section: whoever lends the GPU may take it back.
        args.json.write_text(json.dumps({"machine": machine, "toy": args.toy, "sections": found}, indent=2) + "\n")
    print(f"{machine}\n\n| section | what | value |\n|---|---|---|")
    for name, rows in found.items():
        for what, value in rows.items():
            print(f"| {name} | {what} | {value} |")


if __name__ == "__main__":
    main()
