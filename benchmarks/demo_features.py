"""Writes a feature cache of texts that the demo pair's target wrote itself, for `compare_recipes.py`.

    python benchmarks/demo_features.py --output_dir features --num_rows 1024

Each row is a piece of a training file of the standard library and what the target makes of it, greedily and by
sampling in turn; only the latter counts in training. Started again after it was stopped, it goes on with the states.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

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


@torch.inference_mode()
def write_texts(args: DemoFeaturesArguments, target: torch.nn.Module, train: np.ndarray) -> Dataset:
    """Lets the target continue random pieces of the training text."""
    rows = []
    mask = [0] * args.prompt_length + [1] * (args.length - args.prompt_length - 1) + [0]
    for index in tqdm(range(-(-args.num_rows // args.batch_size)), desc="target writes", unit="batch"):
        generator = np.random.default_rng([args.seed, index])
        starts = generator.integers(0, train.size - args.prompt_length, args.batch_size)
        prompts = np.stack([train[start : start + args.prompt_length] for start in starts]).astype(np.int64)
        torch.manual_seed(args.seed + index)
        texts = target.generate(
            torch.from_numpy(prompts),
            do_sample=index % 2 == 1,
            top_k=0,
            max_length=args.length,
            min_length=args.length,
        )
        rows += [{"input_ids": text, "loss_mask": mask} for text in texts.tolist()]
    return Dataset.from_list(rows[: args.num_rows])


def main() -> None:
    (args,) = HfArgumentParser(DemoFeaturesArguments).parse_args_into_dataclasses()
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    files = {name: text for name, text in corpus.read_library(None).items() if not corpus.is_held_out(name, 20)}
    dataset = write_texts(args, target, corpus.encode_texts(tokenizer, list(files.values())))
    write_feature_cache(dataset, target, tokenizer, args.output_dir, target_layer_ids=args.target_layer_ids)


if __name__ == "__main__":
    main()
