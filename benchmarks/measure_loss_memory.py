"""Measures what the training loss costs, in memory and in time: eager, in chunks by autograd, and in chunks with the
closed form of the cross-entropy's gradient. Each is measured in a process of its own.

python benchmarks/measure_loss_memory.py --vocab_size 32768 --num_tokens 2048
"""

import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

import torch
from demo_pair import parse

from transformers_gumiho import GumihoOutput
from transformers_gumiho.losses.closed_forms import CLOSED_FORMS
from transformers_gumiho.training import chunked_gumiho_loss


LOSSES = {"eager": "eager", "autograd": "in chunks by autograd", "closed_form": "in chunks with the closed form"}


@dataclass
class MeasurementArguments:
    vocab_size: int = 32768
    hidden_size: int = 256
    num_tokens: int = 2048
    chunk_size: int = 256
    dtype: str = field(default="float32", metadata={"help": "Of the output head and the states."})
    repeats: int = field(default=3, metadata={"help": "Timed runs, of which the fastest is reported."})
    loss: str | None = field(default=None, metadata={"help": f"Measure only this one of {', '.join(LOSSES)}."})


def peak_megabytes() -> float:
    """Returns the most memory that this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(args: MeasurementArguments) -> None:
    """Runs one loss forward and backward; prints what it added to the peak, in MB, and the CPU time it took."""
    dtype = getattr(torch, args.dtype)
    head = torch.nn.Linear(args.hidden_size, args.vocab_size, bias=False, dtype=dtype).requires_grad_(False)
    states = torch.randn(1, args.num_tokens, args.hidden_size, dtype=dtype)
    serial = torch.randn(1, args.num_tokens - 1, args.hidden_size, requires_grad=True)
    parallel = torch.randn(1, 5, args.num_tokens - 3, args.hidden_size, requires_grad=True)
    output = GumihoOutput(serial_features=serial, parallel_features=parallel)
    kwargs = {} if args.loss == "eager" else {"chunk_size": args.chunk_size}
    compute = chunked_gumiho_loss
    if args.loss == "eager":  # the tests' oracle
        sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
        compute = import_module("eager_loss").gumiho_loss
    if args.loss == "autograd":
        CLOSED_FORMS.clear()
    before, seconds = peak_megabytes(), []
    for _ in range(args.repeats):
        start = time.process_time()
        loss, _ = compute(output, states, lambda rows: head(rows.to(dtype)), torch.ones(1, args.num_tokens), **kwargs)
        loss.backward()
        seconds.append(time.process_time() - start)
    print(f"{peak_megabytes() - before:.0f} MB, {min(seconds):.2f} s of CPU time")


def main() -> None:
    args = parse(MeasurementArguments, __doc__)
    if args.loss is not None:
        measure(args)
        return
    logits = args.num_tokens * args.vocab_size * 4 / 2**20
    print(f"one position's logits of {args.num_tokens} tokens x {args.vocab_size} entries: {logits:.0f} MB in float32")
    for loss, name in LOSSES.items():
        options = [f"--{name}={value}" for name, value in (asdict(args) | {"loss": loss}).items()]
        result = subprocess.run([sys.executable, __file__, *options], check=True, capture_output=True, text=True)
        print(f"loss {name}, six predicted positions, forward and backward: {result.stdout.strip()}")


if __name__ == "__main__":
    main()
