"""The training stage: the phases of a recipe, each with a `GumihoTrainer`."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ..measuring.prompts import encode_turn
from ..model.configuration_gumiho import resolve_layer_ids
from ..model.modeling_gumiho import GumihoModel
from ..training import (
    CachedFeatures,
    FeatureDataset,
    GumihoTrainer,
    GumihoTrainingArguments,
    last_complete_checkpoint,
    prepare_dataset,
)
from ..training.data.conversations import MalformedRowError, RawText, read_row
from ..training.data.usable_rows import held_out_numbers
from ..user_errors import UserValueError, as_user_errors
from .arguments import RecipeArguments
from .writing import row_length


_TEXT_CHARACTERS = 200  # of a text without a question, the target continues these
_ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc", "linear"]


def train_phases(
    args: RecipeArguments,
    phases: dict[str, GumihoTrainingArguments],
    fields: dict[str, Any],
    data: dict[str, Any],
    folder: Path,
) -> None:
    """
    Trains the phases, whose arguments are given by name, one after the other on `data`, from [`cached_data`] or
    [`online_data`]. Leaves the drafter, its tokenizer and its card in a folder. Each phase continues from its newest
    checkpoint.
    """
    start, last = args.drafter, list(phases)[-1]
    for name, planned in phases.items():
        # Made anew, as accelerate takes DeepSpeed's plug-in of the newest arguments alone.
        training_args = replace(planned)
        set_seed(training_args.seed)
        with unsplit_models(training_args):
            drafter = _make_drafter(args, start, fields, data["target"])
        trainer = GumihoTrainer(drafter, training_args, **data)
        checkpoint = training_args.resume_from_checkpoint or last_complete_checkpoint(training_args.output_dir)
        if checkpoint:
            _say(training_args, f"{name}: continues from {checkpoint}")
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()  # the training's result is kept, whatever becomes of what follows
        if name == last:
            _finish(args, trainer, training_args, folder)
        start = training_args.output_dir
        trainer.accelerator.wait_for_everyone()


def _finish(args: RecipeArguments, trainer: GumihoTrainer, training_args: Any, folder: Path) -> None:
    """Calibrates and evaluates the drafter, and saves it in the target's precision with a card."""
    if trainer.eval_dataset is not None:
        if args.calibrate and not args.lora_rank and (temperatures := trainer.calibrate()):
            _say(training_args, f"draft temperatures: {temperatures}")
        trainer.save_metrics("eval", trainer.evaluate())
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        # Trained in float32, used next to the target.
        dtype = str(trainer.target_features.config.dtype).removeprefix("torch.")
        trainer.model.to(getattr(torch, dtype, torch.float32))
    trainer.save_model(str(folder))
    training_args.output_dir = str(folder)  # where the card goes, which names the folder
    card = {"finetuned_from": args.target, "dataset": None if args.writes_prompts else args.data}
    if training_args.push_to_hub:
        trainer.push_to_hub(**card)
    else:
        trainer.create_model_card(**card)


def cached_data(
    folders: list[str], num_eval_rows: float, held_out: Path | None = None, seed: int = 0
) -> dict[str, Any]:
    """
    Returns the trainer's arguments for training on feature caches. The rows to evaluate on are `held_out`, a cache, or
    else `num_eval_rows` random ones, a share of each cache.
    """
    caches = [FeatureDataset(folder) for folder in folders]
    if len({cache.manifest.fingerprints["data"] for cache in caches}) < len(caches):
        raise UserValueError("--features names caches of the same texts. Give each of them once.")
    rows: Any = torch.utils.data.ConcatDataset(caches)
    share = 0.0 if held_out is not None else len(held_out_numbers(len(rows), num_eval_rows, seed)) / len(rows)
    chosen = [
        start + number
        for start, cache in zip([0, *rows.cumulative_sizes], caches, strict=False)
        for number in held_out_numbers(len(cache), share, seed)
    ]
    eval_rows: Any = FeatureDataset(held_out) if held_out is not None else None
    if chosen:
        eval_rows = torch.utils.data.Subset(rows, chosen)
    return {
        "target": CachedFeatures(folders[0]),
        "eval_dataset": eval_rows,
        "train_dataset": torch.utils.data.Subset(rows, sorted({*range(len(rows))} - {*chosen})),
        "processing_class": AutoTokenizer.from_pretrained(Path(folders[0]) / "target"),
    }


def online_data(
    args: RecipeArguments, target: PreTrainedModel, tokenizer: Any, rows: Any, held_out: Any, training_args: Any
) -> dict[str, Any]:
    """Returns the trainer's arguments for running the target in every step, on rows of conversations."""
    with training_args.main_process_first(desc="preparing the data"):
        train_rows, report = prepared(args, tokenizer, target, rows)
        eval_rows = prepared(args, tokenizer, target, held_out)[0] if held_out is not None else None
    _say(training_args, f"training data: {report}")
    texts = [row["prompt"] for row in map(prompt_of, held_out or []) if row is not None]
    prompts = [encode_turn(tokenizer, [text], []) for text in texts[: args.num_acceptance_prompts]]
    return {
        "target": target,
        "train_dataset": train_rows,
        "eval_dataset": eval_rows,
        "acceptance_prompts": [torch.tensor(ids, device="cpu") for ids in prompts if 0 < len(ids) <= args.max_length],
        "processing_class": tokenizer,
    }


def prepared(args: RecipeArguments, tokenizer: Any, target: PreTrainedModel, rows: Any) -> tuple[Any, Any]:
    """Returns rows of token ids, and what became of the data."""
    max_length = row_length(args, target.config)
    return prepare_dataset(
        rows, tokenizer, target.config, max_length=max_length, packing=bool(args.packing), num_proc=args.num_proc
    )


def prompt_of(row: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns what a user says first in a row, or how its text begins."""
    try:
        example = read_row(row, has_template=True)
    except MalformedRowError:
        return None
    if isinstance(example, RawText):
        return {"prompt": example.prompt or example.completion[:_TEXT_CHARACTERS]}
    said = next((message["content"] for message in example.messages if message["role"] == "user"), None)
    return None if said is None else {"prompt": said}


def _make_drafter(
    args: RecipeArguments, start: str | None, fields: dict[str, Any], source: PreTrainedModel | CachedFeatures
) -> torch.nn.Module:
    """Returns the drafter to train, in float32: mixed precision is the trainer's affair."""
    if (layers := fields.get("target_layer_ids")) is not None:
        fields = fields | {"target_layer_ids": resolve_layer_ids(source.config, layers)}
    if start is not None:
        with as_user_errors():
            drafter = GumihoModel.from_pretrained(start, dtype=torch.float32, **fields)
    elif isinstance(source, CachedFeatures):
        drafter = source.make_drafter(**fields).float()
    else:
        drafter = GumihoModel.from_target(source, **fields).float()
    if not args.lora_rank:
        return drafter
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules=_ADAPTED)
    return get_peft_model(drafter, config)


@contextmanager
def unsplit_models(args: GumihoTrainingArguments) -> Iterator[None]:
    """Keeps DeepSpeed's ZeRO-3 from splitting models as they are made: the trainer splits the drafter alone."""
    unset_hf_deepspeed_config()
    yield
    if args.deepspeed_plugin is not None:
        args.deepspeed_plugin.set_deepspeed_weakref()


def _say(args: Any, text: str) -> None:
    if args.process_index == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
