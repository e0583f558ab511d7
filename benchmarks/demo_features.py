"""Writes a feature cache of texts that the demo pair's target wrote itself, for `compare_recipes.py`.

    python benchmarks/demo_features.py --output_dir features --num_rows 1024

Each row is a piece of a training file of the standard library and what the target makes of it, greedily and by
sampling in turn; only the latter counts in training. The texts are kept next to the cache. Started again after it was
stopped, it goes on where it was.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from transformers_gumiho.training import write_feature_cache


PAIR = Path(__file__).parent.parent / "examples" / "demo_pair"
sys.path.append(str(PAIR))
import stdlib_corpus as corpus  # noqa: E402


@dataclass
class DemoFeaturesArguments:
    output_dir: Path = field(metadata={"help": "The cache."})
    num_rows: int = 1024
    prompt_length: int = 64
    length: int = field(default=256, metadata={"help": "Tokens of a row."})
    batch_size: int = 64
    target_layer_ids: list[int] = field(
        default_factory=lambda: [2, 10, -1], metadata={"help": "Layers whose states are kept."}
    )
    seed: int = 0


def prompts_of(
    args: DemoFeaturesArguments, tokenizer: PreTrainedTokenizerBase, files: list[str], index: int
) -> torch.Tensor:
    """Returns the prompts `(B, T)` of a batch: beginnings of random lines of the training files, and what follows."""
    generator = np.random.default_rng([args.seed, index])
    prompts: list[list[int]] = []
    while len(prompts) < args.batch_size:
        lines = files[generator.integers(len(files))].splitlines(keepends=True)
        start = int(generator.integers(len(lines))) if lines else 0
        ids = tokenizer("".join(lines[start : start + args.prompt_length]))["input_ids"][: args.prompt_length]
        if len(ids) == args.prompt_length:
            prompts.append(ids)
    return torch.tensor(prompts)


@torch.inference_mode()
def write_texts(
    args: DemoFeaturesArguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, files: list[str]
) -> list[list[int]]:
    """Lets the target continue the prompts, and keeps the token ids of each text in a line of a file."""
    path = args.output_dir.with_name(f"{args.output_dir.name}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    num_batches = -(-args.num_rows // args.batch_size)
    for index in tqdm(range(len(lines) // args.batch_size, num_batches), desc="target writes", unit="batch"):
        torch.manual_seed(args.seed + index)
        prompts = prompts_of(args, tokenizer, files, index)
        texts = target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=index % 2 == 1,
            top_k=0,
            max_length=args.length,
            min_length=args.length,
        )
        lines = [*lines[: index * args.batch_size], *map(json.dumps, texts.tolist())]
        partial = path.with_suffix(".partial")
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        partial.replace(path)
    return [json.loads(line) for line in lines[: args.num_rows]]


def main() -> None:
    (args,) = HfArgumentParser(DemoFeaturesArguments).parse_args_into_dataclasses()
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    files = [text for name, text in corpus.read_library(None).items() if not corpus.is_held_out(name)]
    mask = [0] * args.prompt_length + [1] * (args.length - args.prompt_length - 1) + [0]
    rows = [{"input_ids": text, "loss_mask": mask} for text in write_texts(args, target, tokenizer, files)]
    write_feature_cache(
        Dataset.from_list(rows), target, tokenizer, args.output_dir, target_layer_ids=args.target_layer_ids
    )


if __name__ == "__main__":
    main()
