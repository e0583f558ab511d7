"""Measures the memory that the training loss takes, eager and in chunks, each in a process of its own.

python benchmarks/measure_loss_memory.py --vocab_size 32768 --num_tokens 2048
"""

import resource
import subprocess
import sys
from dataclasses import asdict, dataclass, field

import torch
from transformers import HfArgumentParser

from transformers_gumiho import GumihoOutput
from transformers_gumiho.training import LossWeights, chunked_gumiho_loss, gumiho_loss


@dataclass
class MeasurementArguments:
    vocab_size: int = 32768
    hidden_size: int = 256
    num_tokens: int = 2048
    chunk_size: int = 256
    loss: str | None = field(default=None, metadata={"help": "Measure only this one, `eager` or `chunked`."})


def peak_megabytes() -> float:
    """Returns the most memory that this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(args: MeasurementArguments) -> None:
    """Runs one loss forward and backward; prints what it added to the peak, in MB."""
    head = torch.nn.Linear(args.hidden_size, args.vocab_size, bias=False).requires_grad_(False)
    states = torch.randn(1, args.num_tokens, args.hidden_size)
    serial = torch.randn(1, args.num_tokens - 1, args.hidden_size, requires_grad=True)
    parallel = torch.randn(1, 5, args.num_tokens - 3, args.hidden_size, requires_grad=True)
    output = GumihoOutput(serial_features=serial, parallel_features=parallel)
    kwargs = {"chunk_size": args.chunk_size} if args.loss == "chunked" else {}
    compute = chunked_gumiho_loss if args.loss == "chunked" else gumiho_loss
    before = peak_megabytes()
    loss, _ = compute(output, states, head, torch.ones(1, args.num_tokens), LossWeights(), **kwargs)
    loss.backward()
    print(f"{peak_megabytes() - before:.0f}")


def main() -> None:
    (args,) = HfArgumentParser(MeasurementArguments).parse_args_into_dataclasses()
    if args.loss is not None:
        measure(args)
        return
    logits = args.num_tokens * args.vocab_size * 4 / 2**20
    print(f"one position's logits of {args.num_tokens} tokens x {args.vocab_size} entries: {logits:.0f} MB in float32")
    for loss in ("eager", "chunked"):
        options = [f"--{name}={value}" for name, value in (asdict(args) | {"loss": loss}).items()]
        result = subprocess.run([sys.executable, __file__, *options], check=True, capture_output=True, text=True)
        print(f"{loss} loss, six predicted positions, forward and backward: {result.stdout.strip()} MB")


if __name__ == "__main__":
    main()
