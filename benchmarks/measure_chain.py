"""Measures what verifying chains costs a target with recurrent states: passes of the target, and memory.

    python benchmarks/measure_chain.py

The target is a hybrid in Qwen3.5's shape with random weights: real widths, few layers, a small vocabulary. Drafts are
the target's own tokens, of which about one in twelve is made wrong, so that nearly every cycle takes something back.

The ideal is one pass for each cycle: a target that could go back for free. The states that are kept are counted when
they are kept, beside those in the cache and the keys and values, after two lengths of text.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from demo_pair import parse
from partly_right_drafts import partly_right_drafts
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig

from transformers_gumiho import GumihoModel
from transformers_gumiho.internals import CACHE_NAME
from transformers_gumiho.model.decoding_settings import NEVER_PAUSES
from transformers_gumiho.verification import chains
from transformers_gumiho.verification.chains import StateSnapshot


@dataclass
class ChainArguments:
    hidden_size: int = 1024
    intermediate_size: int = 3584
    num_layers: int = field(default=4, metadata={"help": "Three of four have a recurrent state."})
    vocab_size: int = 4096
    lengths: list[int] = field(default_factory=lambda: [64, 512], metadata={"help": "Tokens of the prompts."})
    max_new_tokens: int = 128
    num_assistant_tokens: int = 7


@dataclass
class Memory:
    """Bytes: the most that was kept at a time, and what the cache held then."""

    kept: int = 0
    states: int = 0
    keys_and_values: int = 0


def make_pair(args: ChainArguments) -> tuple[PreTrainedModel, GumihoModel]:
    """Returns a random target in Qwen3.5's shape, and a random drafter, whose drafts are replaced."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    target = AutoModelForCausalLM.from_config(config).eval()
    target.generation_config.pad_token_id = 0
    drafter = GumihoModel.from_target(target, intermediate_size=256).eval()
    drafter.generation_config.update(num_assistant_tokens=args.num_assistant_tokens, break_even=NEVER_PAUSES)
    return target, drafter


@contextmanager
def counting_memory() -> Iterator[Memory]:
    """Counts what is kept of the target's cache within it."""
    memory = Memory()
    kept_layers: dict[int, int] = {}  # by layer of the cache: of each there is one at a time

    class CountedLayer(StateSnapshot):
        def __init__(self, layer: Any):
            super().__init__(layer)
            own = {tensor.data_ptr() for tensor in tensors(vars(layer))}
            copies = [tensor for tensor in tensors(self.held) if tensor.data_ptr() not in own]
            kept_layers[id(layer)] = sum(tensor.nbytes for tensor in copies)
            memory.kept = max(memory.kept, sum(kept_layers.values()))

    chains.StateSnapshot = CountedLayer
    try:
        yield memory
    finally:
        chains.StateSnapshot = StateSnapshot


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def measure(target: PreTrainedModel, drafter: GumihoModel, length: int, args: ChainArguments) -> str:
    """Returns the row of the table for prompts of `length` tokens."""
    ids = torch.randint(1, args.vocab_size, (1, length), generator=torch.Generator().manual_seed(length))
    settings = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    plain = target.generate(ids, **settings)
    passes: list[int] = []
    handle = target.register_forward_hook(lambda *_: passes.append(1))
    with partly_right_drafts(plain, length, args.vocab_size), counting_memory() as memory:
        drafted = target.generate(ids, **settings, assistant_model=drafter, return_dict_in_generate=True)
    handle.remove()
    layers = drafted[CACHE_NAME].layers
    entries = sum(tensor.nbytes for layer in layers if hasattr(layer, "keys") for tensor in (layer.keys, layer.values))
    states = sum(tensor.nbytes for layer in layers for tensor in tensors(vars(layer))) - entries
    cycles = drafted.accepted_lengths[0]
    num_passes = len(passes) - 1  # without the prompt's
    is_same = "yes" if torch.equal(drafted.sequences, plain) else "NO"
    tau = sum(cycles) / len(cycles)
    return (
        f"| {length} | {is_same} | {tau:.2f} | {len(cycles)} | {num_passes} | "
        f"{num_passes / len(cycles) - 1:.1%} | {num_passes / sum(cycles):.3f} | {states / 1e6:.2f} MB | "
        f"{memory.kept / 1e6:.2f} MB | {entries / 1e6:.2f} MB |"
    )


def main() -> None:
    args = parse(ChainArguments, __doc__)
    target, drafter = make_pair(args)
    print(f"{sum(parameter.numel() for parameter in target.parameters()) / 1e6:.0f} million parameters\n")
    # What is tried at the first call for a class and config is not counted.
    target.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=4, assistant_model=drafter)
    columns = ("prompt", "text equals plain", "tau", "cycles", "passes", "more than cycles", "passes per token")
    print("| " + " | ".join((*columns, "states", "kept", "keys and values")) + " |\n" + "|---" * 10 + "|")
    for length in args.lengths:
        print(measure(target, drafter, length, args), flush=True)


if __name__ == "__main__":
    main()
