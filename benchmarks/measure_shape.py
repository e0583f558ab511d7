"""Measures what a cycle costs in steps of plain decoding, for a drafter and a target of any size.

    python benchmarks/measure_shape.py                 # the shape of Llama-3-8B, on a GPU with 24 GB

The weights are random, so no text is worth reading and no tau worth counting; what counts is the ratio of a cycle's
time to that of a plain step, both with static caches and compiled. The speed-up of a trained drafter is tau / ratio.
The last columns are those of cycles in which attention copies keys and values for each query head of a group, as
transformers' own `sdpa` function does.
Where both are bound by reading weights, the ratio is at least 1 + bytes that the drafter reads in a cycle / bytes that
the target reads in a step.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from demo_pair import parse
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from transformers_gumiho import GumihoConfig, GumihoModel
from transformers_gumiho.internals import compile_on_every_device
from transformers_gumiho.model.decoding_settings import NEVER_PAUSES
from transformers_gumiho.tools.measuring.timing import time_decoding


@dataclass
class ShapeArguments:
    assistant: str = field(
        default="amd/Gumiho-llama3-8b",
        metadata={"help": "A drafter, a folder or a name on the Hub; its config is read, its weights are not."},
    )
    num_layers: int = field(default=32, metadata={"help": "Layers of the target; its widths are the drafter's."})
    draft_vocabulary: int | None = field(default=None, metadata={"help": "Tokens that are drafted (default: all)."})
    nodes: list[int] = field(default_factory=lambda: [16, 32, 64, 128], metadata={"help": "Drafted tokens of trees."})
    context: int = field(default=512, metadata={"help": "Tokens of the prompt."})
    branching_factor: int = field(default=14, metadata={"help": "Tokens kept at each serial step."})
    max_new_tokens: int = field(default=64, metadata={"help": "Tokens of each run, over which times are averaged."})
    repeats: int = field(default=5, metadata={"help": "Runs of each, of which the median counts."})
    dtype: str = field(default="bfloat16", metadata={"help": "Precision of both models."})
    device: str = field(default="cuda", metadata={"help": "Where both models are; `cpu` for small shapes."})
    compile: bool = field(default=True, metadata={"help": "Static caches and compiled models, or neither."})


def make_pair(args: ShapeArguments) -> tuple[PreTrainedModel, GumihoModel]:
    """Returns a target and a drafter with random weights."""
    config = GumihoConfig.from_pretrained(args.assistant)
    llama = config.get_text_config().to_dict() | {"num_hidden_layers": args.num_layers, "model_type": "llama"}
    with torch.device(args.device):
        target = AutoModelForCausalLM.from_config(LlamaConfig(**llama), dtype=getattr(torch, args.dtype)).eval()
        gumiho = GumihoModel(config).to(target.dtype).eval()
    # Every run is to decode the same number of tokens.
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    gumiho.generation_config.update(branching_factor=args.branching_factor, break_even=NEVER_PAUSES)
    if args.draft_vocabulary is not None:
        gumiho.generation_config.draft_vocabulary = list(range(args.draft_vocabulary))
    return target, gumiho


def bytes_read(target: PreTrainedModel, gumiho: GumihoModel) -> tuple[int, int]:
    """Returns the bytes of weights that a step of the target reads, and those that the drafter reads in a cycle."""

    def size(module: nn.Module) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())

    head = target.get_output_embeddings()
    vocabulary = gumiho.generation_config.draft_vocabulary
    drafted_rows = size(head) if vocabulary is None else size(head) * len(vocabulary) // head.out_features
    num_serial_tokens = gumiho.config.num_serial_tokens
    # One token more than the serial head makes is fused and scored: those of the parallel heads, all at once.
    drafter = num_serial_tokens * size(gumiho.layers) + size(gumiho.mlp)
    drafter += (num_serial_tokens + 1) * (size(gumiho.fc) + drafted_rows)
    # Of the embedding only the rows of the tokens at hand.
    return size(target.get_decoder()) - size(target.get_input_embeddings()) + size(head), drafter


@contextmanager
def without_cudnn() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


# How passes of this package attend on a GPU. On a CPU the last one is the first.
WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "in place": nullcontext,
    "copied": lambda: patch("transformers_gumiho.generation.verification.attention._would_copy", lambda *args: False),
    "without cuDNN": without_cudnn,
}


def measure(
    target: PreTrainedModel, gumiho: GumihoModel, args: ShapeArguments, ways: Sequence[str] = ("in place", "copied")
) -> tuple[float, dict[int, tuple[float, ...]]]:
    """
    Returns the median seconds of a plain step, and of a cycle with trees of each size, for each of the ways of
    attention; measured in turns.
    """
    settings: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    if args.compile:
        settings |= {"cache_implementation": "static", "compile_config": compile_on_every_device()}
    vocab_size = target.get_output_embeddings().out_features
    ids = torch.randint(vocab_size, (1, args.context), generator=torch.Generator().manual_seed(0)).to(target.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain: list[float] = []
    cycles: dict[int, dict[str, list[float]]] = {size: {way: [] for way in ways} for size in args.nodes}
    for _ in range(args.repeats + 1):  # the first one warms up
        taken = time_decoding(target, inputs, **settings)
        plain.append(taken.pass_seconds)
        for size, times in cycles.items():
            for way in ways:
                with WAYS[way]():
                    drafted = settings | {"assistant_model": gumiho}
                    taken = time_decoding(target, inputs, settings={"num_assistant_tokens": size}, **drafted)
                times[way].append(taken.pass_seconds)
    medians = {size: tuple(statistics.median(times[way][1:]) for way in ways) for size, times in cycles.items()}
    return statistics.median(plain[1:]), medians


def main() -> None:
    args = parse(ShapeArguments, __doc__)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(
            "There is no CUDA device. Give another --device; for `cpu` also a small shape: --assistant "
            "examples/demo_pair/gumiho --num_layers 20 --dtype float32 --context 128"
        )
    target, gumiho = make_pair(args)
    of_target, of_drafter = bytes_read(target, gumiho)
    step, cycles = measure(target, gumiho, args)
    print(
        f"weights read: {of_target / 1e9:.3f} GB by a plain step, {of_drafter / 1e9:.3f} GB by the drafter in a cycle"
    )
    print(f"plain step: {1e3 * step:.2f} ms; the ratio is at least {1 + of_drafter / of_target:.2f}")
    print("| drafted tokens | cycle | ratio | cycle with copies | ratio |\n|---|---|---|---|---|")
    for size, ways in cycles.items():
        print(f"| {size} | " + " | ".join(f"{1e3 * seconds:.2f} ms | {seconds / step:.2f}" for seconds in ways) + " |")


if __name__ == "__main__":
    main()
