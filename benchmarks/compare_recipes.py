"""Trains drafters of one size on the same tokens, each by another recipe, and measures what they are worth.

    python benchmarks/demo_features.py --output_dir features
    python benchmarks/compare_recipes.py --features_dir features

By default for the demo pair; for another target, give it, a feature cache of it (`gumiho train --stages features`,
with `--target_layer_ids` for the recipes that read several layers) and prompts that are not in the cache. The first
rows of the cache are held out. Started again after it was stopped, the command continues from the newest checkpoint,
and leaves out what `--output` has a line for under the same settings. `recipes.py` says what each recipe changes.
"""

import gc
import hashlib
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from demo_pair import DEMO_PAIR, parse
from recipe_table import table
from recipes import RECIPES, fitted_config
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

from transformers_gumiho import GumihoConfig, GumihoModel
from transformers_gumiho.measuring.prompts import encode_turn, pad_left, read_questions
from transformers_gumiho.measuring.timing import temporary_settings
from transformers_gumiho.model.decoding_settings import NEVER_PAUSES
from transformers_gumiho.training import (
    CachedFeatures,
    FeatureDataset,
    GumihoTrainer,
    GumihoTrainingArguments,
    last_complete_checkpoint,
)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0},
}


@dataclass
class ComparisonArguments:
    features_dir: Path = field(metadata={"help": "The feature cache to train on."})
    target: str = field(
        default=str(DEMO_PAIR / "target"), metadata={"help": "The target: a folder or a name on the Hub."}
    )
    prompts: str = field(default=str(DEMO_PAIR / "prompts.jsonl"), metadata={"help": "Prompts to measure with."})
    recipes: list[str] = field(default_factory=lambda: list(RECIPES), metadata={"help": "Which to compare."})
    seeds: list[int] = field(default_factory=lambda: [0, 1])
    output: Path = field(default=Path("recipes.jsonl"), metadata={"help": "One line for each recipe and seed."})
    work_dir: Path = field(default=Path("recipes_work"), metadata={"help": "Checkpoints and drafters."})

    num_train_epochs: float = 20.0
    batch_size: int = 16
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    draft_vocabulary_size: int | None = field(default=None, metadata={"help": "Of all drafters (default: all)."})
    group_by_length: bool = field(default=False, metadata={"help": "Batches of rows of like length."})
    num_eval_rows: int = field(default=64, metadata={"help": "Rows of the cache that are held out."})
    save_steps: int = 250
    bf16: bool = False

    num_prompts: int = 16
    prompts_per_batch: int = field(default=8, metadata={"help": "Prompts that are continued together."})
    max_new_tokens: int = 128
    nodes: list[int] = field(default_factory=lambda: [12, 32, 63], metadata={"help": "Drafted tokens of each tree."})
    dtype: str = field(default="float32", metadata={"help": "The precision to measure in."})

    @property
    def settings(self) -> dict[str, Any]:
        """What a line of the output holds for, besides its recipe and seed."""
        left_out = {"recipes", "seeds", "output", "work_dir", "save_steps"}
        return {name: str(v) if isinstance(v, Path) else v for name, v in asdict(self).items() if name not in left_out}

    def folder_of(self, name: str, seed: int) -> Path:
        """Returns where the checkpoints of a recipe and a seed are: under other settings, elsewhere."""
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:12]
        return self.work_dir / f"{name}-{seed}-{digest}"


def train(
    args: ComparisonArguments, name: str, seed: int, target: PreTrainedModel, config: GumihoConfig
) -> tuple[GumihoModel, dict]:
    """Returns the drafter of a recipe and a seed, of this config, and what its training took."""
    features = CachedFeatures(args.features_dir)
    folder = args.folder_of(name, seed)
    set_seed(seed)
    drafter, rows = make_drafter(config, features), FeatureDataset(args.features_dir)
    trained = torch.utils.data.Subset(rows, range(args.num_eval_rows, len(rows)))
    held_out = torch.utils.data.Subset(rows, range(args.num_eval_rows))
    training_args = training_arguments(args, folder, seed, name)
    trainer = GumihoTrainer(drafter, training_args, target=features, train_dataset=trained, eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder))
    metrics = trainer.evaluate()
    num_tokens = sum(len(rows.tokens_of(index)["input_ids"]) for index in trained.indices)
    agreements = [metrics[f"eval_agreement_{depth}"] for depth in range(1, config.max_draft_depth + 1)]
    return drafter, {"steps": trainer.state.global_step, "tokens": num_tokens, "agreements": agreements}


def make_drafter(config: Any, features: CachedFeatures) -> GumihoModel:
    """Returns the untrained drafter of a recipe."""
    drafter = GumihoModel(config).float()
    drafter.adopt_embedding(features.embedding.float())
    return drafter


def training_arguments(args: ComparisonArguments, folder: Path, seed: int, name: str) -> GumihoTrainingArguments:
    defaults = {
        "num_train_epochs": args.num_train_epochs,
        "per_device_train_batch_size": args.batch_size,
        "per_device_eval_batch_size": args.batch_size,
        "train_sampling_strategy": "group_by_length" if args.group_by_length else "random",
        "draft_vocabulary_size": args.draft_vocabulary_size,
        "learning_rate": args.learning_rate,
        "warmup_steps": args.warmup_steps,
        "save_steps": args.save_steps,
        "save_total_limit": 1,
        "bf16": args.bf16,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
        "dataloader_pin_memory": False,
        "logging_steps": 50,
    }
    return GumihoTrainingArguments(output_dir=str(folder), seed=seed, **defaults | RECIPES[name].training)


def measure(args: ComparisonArguments, target: PreTrainedModel, drafter: GumihoModel) -> dict[str, Any]:
    """
    Returns for each way of generating and size of tree the tokens that each cycle of each prompt committed. The chain
    is the longest that the drafter drafts.
    """
    drafter.to(target.dtype).eval()
    batches = read_prompts(args, target.device)
    chain = {"branching_factor": 1, "num_assistant_tokens": drafter.config.max_draft_depth}
    shapes = {"chain": chain} | {str(nodes): {"num_assistant_tokens": nodes} for nodes in args.nodes}
    lengths: dict[str, dict[str, list[list[int]]]] = {}
    for way, kwargs in WAYS.items():
        for shape, settings in shapes.items():
            with temporary_settings(drafter, settings | {"break_even": NEVER_PAUSES}):
                found = [accepted_lengths(args, target, drafter, batch, kwargs) for batch in batches]
            lengths.setdefault(way, {})[shape] = [of_prompt for of_batch in found for of_prompt in of_batch]
    return {"accepted_lengths": lengths}


def read_prompts(args: ComparisonArguments, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Returns the prompts as batches of `input_ids` and `attention_mask`, `(B, T)` each, padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    questions = read_questions(args.prompts, num_questions=args.num_prompts)
    prompts = [encode_turn(tokenizer, question.turns[:1], []) for question in questions]
    size = args.prompts_per_batch
    starts = range(0, len(prompts), size)
    return [pad_left(prompts[start : start + size], tokenizer.pad_token_id, device) for start in starts]


def accepted_lengths(
    args: ComparisonArguments,
    target: PreTrainedModel,
    drafter: GumihoModel,
    batch: dict[str, torch.Tensor],
    kwargs: dict[str, Any],
) -> list[list[int]]:
    """Returns for each prompt of a batch the tokens that each cycle committed after it."""
    torch.manual_seed(0)
    settings = {"max_new_tokens": args.max_new_tokens, "return_dict_in_generate": True}
    return target.generate(**batch, assistant_model=drafter, **settings, **kwargs).accepted_lengths


def read(args: ComparisonArguments) -> list[dict[str, Any]]:
    """Returns the lines of the output that hold for these settings."""
    if not args.output.exists():
        return []
    records = [json.loads(line) for line in args.output.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["settings"] == args.settings]


def main() -> None:
    args = parse(ComparisonArguments, __doc__)
    if unknown := set(args.recipes) - set(RECIPES):
        raise SystemExit(f"There are no recipes {sorted(unknown)}, only {', '.join(RECIPES)}.")
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype)).eval()
    known = {(record["recipe"], record["seed"]) for record in read(args)}
    for seed in args.seeds:
        for name in args.recipes:
            if (name, seed) not in known:
                add_row(args, name, seed, target)
                gc.collect()
    print(table(read(args), args.nodes))


def add_row(args: ComparisonArguments, name: str, seed: int, target: PreTrainedModel) -> None:
    """Trains and measures one drafter, and appends its line to the output."""
    features = CachedFeatures(args.features_dir)
    try:
        config, num_parameters = fitted_config(RECIPES[name], target.config, features.layer_ids)
    except ValueError as error:
        print(f"{name} is left out: {error}", file=sys.stderr)
        return
    drafter, training = train(args, name, seed, target, config)
    record = {"recipe": name, "seed": seed, "settings": args.settings, "parameters": num_parameters, **training}
    record |= measure(args, target, drafter)
    with args.output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(f"{name}, seed {seed}: done", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
