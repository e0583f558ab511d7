"""Writes a feature cache of texts that the demo pair's target wrote itself, for `compare_recipes.py`.

    python benchmarks/demo_features.py --output_dir features --num_rows 1024

Each row is a piece of a training file of the standard library and the target's continuation, in turn greedy and
sampled; only the continuation counts in training. The texts are kept next to the cache. If you stop the script and
start it again, it continues; with other settings it begins anew.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from demo_pair import DEMO_PAIR, parse
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from transformers_gumiho.training import write_feature_cache


sys.path.append(str(DEMO_PAIR))
import stdlib_corpus as corpus


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

    @property
    def texts_file(self) -> Path:
        """Where the texts are kept: those that were written under other settings are elsewhere."""
        names = ("prompt_length", "length", "batch_size", "seed")
        settings = "-".join(str(getattr(self, name)) for name in names)
        return self.output_dir.with_name(f"{self.output_dir.name}-{settings}.jsonl")


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
    path = args.texts_file
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    num_batches = -(-args.num_rows // args.batch_size)
    for index in tqdm(range(len(lines) // args.batch_size, num_batches), desc="target writes", unit="batch"):
        torch.manual_seed(args.seed + index)
        prompts = prompts_of(args, tokenizer, files, index)
        texts = continue_prompts(args, target, prompts, index * args.batch_size)
        lines = [*lines[: index * args.batch_size], *map(json.dumps, texts.tolist())]
        partial = path.with_suffix(".partial")
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        partial.replace(path)
    return [json.loads(line) for line in lines[: args.num_rows]]


def continue_prompts(
    args: DemoFeaturesArguments, target: PreTrainedModel, prompts: torch.Tensor, first_row: int
) -> torch.Tensor:
    """
    Returns the texts `(B, T)` that the target makes of the prompts of the rows from `first_row` on: greedily in even
    rows and by sampling in odd ones, so that any part of the rows, such as those that are held out, has both.
    """
    texts = prompts.new_zeros(len(prompts), args.length)
    for offset in range(2):
        some = prompts[offset::2]
        if len(some):
            texts[offset::2] = target.generate(
                some,
                attention_mask=torch.ones_like(some),
                do_sample=(first_row + offset) % 2 == 1,
                top_k=0,
                max_length=args.length,
                min_length=args.length,
            )
    return texts


def main() -> None:
    args = parse(DemoFeaturesArguments, __doc__)
    target = AutoModelForCausalLM.from_pretrained(DEMO_PAIR / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_PAIR / "target")
    files = [text for name, text in corpus.read_library(None).items() if not corpus.is_held_out(name)]
    mask = [0] * args.prompt_length + [1] * (args.length - args.prompt_length - 1) + [0]
    rows = [{"input_ids": text, "loss_mask": mask} for text in write_texts(args, target, tokenizer, files)]
    write_feature_cache(
        Dataset.from_list(rows), target, tokenizer, args.output_dir, target_layer_ids=args.target_layer_ids
    )


if __name__ == "__main__":
    main()
