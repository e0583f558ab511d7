"""Measures what sharing the target's token embedding saves, by default in the shape of Llama 3 8B's.

python benchmarks/measure_embedding_memory.py
"""

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM

from transformers_gumiho import GumihoModel


@dataclass
class MeasurementArguments:
    vocab_size: int = 128256
    hidden_size: int = 4096


def resident_gigabytes() -> float:
    """Returns the memory of this process that is resident now. Linux only."""
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmRSS:")[1].split()[0]) / 2**20


def main() -> None:
    (args,) = HfArgumentParser(MeasurementArguments).parse_args_into_dataclasses()
    small = {"intermediate_size": 64, "num_attention_heads": 32, "num_key_value_heads": 8}
    shape = {"vocab_size": args.vocab_size, "hidden_size": args.hidden_size, "num_hidden_layers": 1}
    config = LlamaConfig(tie_word_embeddings=True, **shape, **small)
    target = LlamaForCausalLM(config).to(torch.bfloat16)
    before = resident_gigabytes()
    drafter = GumihoModel.from_target(target, num_parallel_heads=0, intermediate_size=64)
    own = resident_gigabytes()
    if not drafter.share_embedding(target):
        raise RuntimeError("The drafter's embedding is a copy of the target's, and was not found to be equal.")
    shared = resident_gigabytes()
    print(f"a drafter of one {args.vocab_size} x {args.hidden_size} embedding and small layers, in bf16")
    print(f"with an embedding of its own: {own - before:.2f} GB; with the target's: {shared - before:.2f} GB")


if __name__ == "__main__":
    main()
