"""The training stage: the phases of a recipe, each with a `GumihoTrainer`."""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoTokenizer, PreTrainedModel, PrinterCallback, TrainerState, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ProgressCallback

from ..measuring.prompts import encode_turn
from ..model.configuration_gumiho import resolve_layer_ids
from ..model.modeling_gumiho import GumihoModel
from ..resumable_file import Record
from ..text_files import MalformedRowError
from ..training import (
    CachedFeatures,
    FeatureDataset,
    GumihoTrainer,
    GumihoTrainingArguments,
    last_complete_checkpoint,
    prepare_dataset,
)
from ..training.data.conversations import read_row
from ..training.data.preparation import held_out_numbers
from ..training.feature_cache import MADE_FROM, row_lengths
from ..user_errors import UserValueError, as_user_errors
from .arguments import RecipeArguments
from .progress import Bar, Progress
from .records import training_contents
from .writing import row_length


_TEXT_CHARACTERS = 200  # of a text without a question, the target continues these
_ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc", "linear"]


def train_phases(
    args: RecipeArguments,
    phases: dict[str, GumihoTrainingArguments],
    fields: dict[str, Any],
    data: dict[str, Any],
    load_source: Callable[[], PreTrainedModel | CachedFeatures],
    made_from: dict[str, Any],
    folder: Path,
) -> None:
    """
    Trains the phases, whose arguments are given by name, one after the other on `data`, from [`cached_data`] or
    [`online_data`], which was `made_from` these contents. Leaves the drafter, its tokenizer and its card in a folder.
    A phase that was stopped continues from its newest checkpoint, one that is finished is left as it is, and each
    begins with the best drafter of the one before it. `load_source` gives the target or its cached features, and is
    called only if there is anything to train.
    """
    start, trainer = args.drafter, None
    work = Path(next(iter(phases.values())).output_dir).parent
    whole = Record(work / "train" / MADE_FROM)
    for number, (name, planned) in enumerate(phases.items(), 1):
        training_args = fit_to_data(args, planned, data)
        record = Record(Path(training_args.output_dir) / MADE_FROM)
        contents = made_from | training_contents(args, training_args, fields, start)
        is_longer = _is_longer(record, contents, training_args, name)
        is_done = record.is_finished and not is_longer
        PartialState().wait_for_everyone()
        if is_done:
            _say(f"{name}: finished before")
            start = training_args.output_dir
            continue
        if PartialState().is_main_process:
            whole.write({})
            record.write(contents | _length_of(training_args))
            for later in list(phases)[number:]:  # they began with what this one was before
                shutil.rmtree(work / later, ignore_errors=True)
        set_seed(training_args.seed)
        checkpoint = training_args.resume_from_checkpoint or last_complete_checkpoint(training_args.output_dir)
        state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME)) if checkpoint else None
        if has_ended := state is not None and not is_longer and state.global_step >= state.max_steps:
            start = state.best_model_checkpoint or checkpoint  # it was stopped before its result was kept
        with unsplit_models(training_args):
            source = load_source()
            drafter = _make_drafter(args, start, fields, source, is_trained=has_ended)
        trainer = _make_trainer(f"{name} {number}/{len(phases)}", drafter, training_args, data | {"target": source})
        if has_ended:
            trainer.state = state
        else:
            if checkpoint:
                _say(f"{name}: continues from {checkpoint}")
            trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()  # the training's result is kept, whatever becomes of what follows
        trainer.save_state()
        trainer.accelerator.wait_for_everyone()
        if PartialState().is_main_process:
            record.write(contents | _length_of(training_args), is_finished=True)
        start = training_args.output_dir
    how = {"calibrate": args.calibrate, "num_eval_rows": args.num_eval_rows}
    if trainer is None and whole.is_finished and whole.made_from == how:
        return
    if trainer is None:  # it was stopped after the last phase
        with unsplit_models(training_args):
            source = load_source()
            drafter = _make_drafter(args, start, fields, source, is_trained=True)
        trainer = _make_trainer(name, drafter, training_args, data | {"target": source})
        trainer.state = TrainerState.load_from_json(str(Path(training_args.output_dir) / TRAINER_STATE_NAME))
    if PartialState().is_main_process:
        for stage in ("tune", "evaluate"):  # of an earlier drafter
            shutil.rmtree(work / stage, ignore_errors=True)
    _finish(args, trainer, training_args, folder)
    trainer.accelerator.wait_for_everyone()
    if PartialState().is_main_process:
        whole.write(how, is_finished=True)


def fit_to_data(
    args: RecipeArguments, planned: GumihoTrainingArguments, data: dict[str, Any]
) -> GumihoTrainingArguments:
    """Returns a phase's arguments with as many rows in a batch as `--tokens_per_step` asks for, and what they hold."""
    changes: dict[str, Any] = {}
    if data["eval_dataset"] is None:
        changes = {"eval_strategy": "no", "load_best_model_at_end": False}
    lengths = row_lengths(data["train_dataset"])
    if args.tokens_per_step is not None and lengths:
        rows = args.tokens_per_step * len(lengths) / sum(lengths)
        changes["per_device_train_batch_size"] = max(round(rows / planned.world_size), 1)
    # Made anew, as accelerate takes DeepSpeed's plug-in of the newest arguments alone.
    return replace(planned, **changes)


def _length_of(training_args: GumihoTrainingArguments) -> dict[str, float]:
    return {"max_steps": training_args.max_steps, "num_train_epochs": training_args.num_train_epochs}


def _is_longer(record: Record, contents: dict[str, Any], training_args: GumihoTrainingArguments, name: str) -> bool:
    """Returns whether a phase is to be longer than it was; raises `ValueError` where anything else has changed."""
    way_out = f"Give these values again, begin anew with --restart {name}, or choose another --output_dir."
    before = {key: value for key, value in record.made_from.items() if key in ("max_steps", "num_train_epochs")}
    now = _length_of(training_args)
    counts_steps = before.get("max_steps", -1) > 0
    if any(now[key] < value for key, value in before.items()) or counts_steps != (now["max_steps"] > 0):
        contents = contents | now
    record.check(contents, way_out)
    is_longer = bool(before) and before != now
    if is_longer:
        _say(f"{name}: trains on, with the schedule of the longer run ({before}, now {now})")
    return is_longer


def _make_trainer(
    phase: str, drafter: torch.nn.Module, training_args: GumihoTrainingArguments, data: dict[str, Any]
) -> GumihoTrainer:
    lengths = row_lengths(data["train_dataset"])
    rows = training_args.train_batch_size * training_args.gradient_accumulation_steps * training_args.world_size
    progress = Progress(phase, sum(lengths) / len(lengths) * rows if lengths else None)
    trainer = GumihoTrainer(drafter, training_args, callbacks=[progress], **data)
    trainer.remove_callback(PrinterCallback)
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(Bar)
    progress.trainer = trainer
    return trainer


def _finish(args: RecipeArguments, trainer: GumihoTrainer, training_args: Any, folder: Path) -> None:
    """Calibrates and evaluates the drafter, and saves it in the target's precision with a card."""
    if trainer.eval_dataset is not None:
        if args.calibrate and not args.lora_rank and (temperatures := trainer.calibrate()):
            _say(f"draft temperatures: {temperatures}")
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
    if len({str(cache.made_from.get("data")) for cache in caches}) < len(caches):
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
        "eval_dataset": eval_rows,
        "train_dataset": torch.utils.data.Subset(rows, sorted({*range(len(rows))} - {*chosen})),
        "processing_class": AutoTokenizer.from_pretrained(Path(folders[0]) / "target"),
    }


def online_data(
    args: RecipeArguments, target_config: Any, tokenizer: Any, rows: Any, held_out: Any, training_args: Any
) -> dict[str, Any]:
    """Returns the trainer's arguments for running the target in every step, on rows of conversations."""
    with training_args.main_process_first(desc="preparing the data"):
        train_rows, report = prepared(args, tokenizer, target_config, rows)
        eval_rows = prepared(args, tokenizer, target_config, held_out)[0] if held_out is not None else None
    _say(f"training data: {report}")
    texts = [row["prompt"] for row in map(prompt_of, held_out or []) if row is not None]
    prompts = [encode_turn(tokenizer, [text], []) for text in texts[: args.num_acceptance_prompts]]
    return {
        "train_dataset": train_rows,
        "eval_dataset": eval_rows,
        "acceptance_prompts": [torch.tensor(ids, device="cpu") for ids in prompts if 0 < len(ids) <= args.max_length],
        "processing_class": tokenizer,
    }


def prepared(args: RecipeArguments, tokenizer: Any, target_config: Any, rows: Any) -> tuple[Any, Any]:
    """Returns rows of token ids, and what became of the data."""
    max_length = row_length(args, target_config)
    return prepare_dataset(
        rows, tokenizer, target_config, max_length=max_length, packing=bool(args.packing), num_proc=args.num_proc
    )


def prompt_of(row: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns what a user says first in a row, or how its text begins."""
    try:
        example = read_row(row, has_template=True, answered=False)
    except MalformedRowError:
        return None
    said = next((message["content"] for message in example.messages if message["role"] == "user"), None)
    return None if said is None else {"prompt": said[:_TEXT_CHARACTERS] if example.text else said}


def _make_drafter(
    args: RecipeArguments,
    start: str | None,
    fields: dict[str, Any],
    source: PreTrainedModel | CachedFeatures,
    is_trained: bool = False,
) -> torch.nn.Module:
    """Returns the drafter to train, or that is trained, in float32: mixed precision is the trainer's affair."""
    adapter, start = (start, args.drafter) if is_trained and args.lora_rank else (None, start)
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
    from peft import LoraConfig, PeftModel, get_peft_model

    if adapter is not None:
        return PeftModel.from_pretrained(drafter, adapter, is_trainable=True)
    config = LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules=_ADAPTED)
    return get_peft_model(drafter, config)


@contextmanager
def unsplit_models(args: GumihoTrainingArguments) -> Iterator[None]:
    """Keeps DeepSpeed's ZeRO-3 from splitting models as they are made: the trainer splits the drafter alone."""
    unset_hf_deepspeed_config()
    yield
    if args.deepspeed_plugin is not None:
        args.deepspeed_plugin.set_deepspeed_weakref()


def _say(text: str) -> None:
    if PartialState().is_main_process:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
