"""The training stage: the phases of a recipe, each with a `GumihoTrainer`."""

import logging
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PrinterCallback, TrainerState, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ProgressCallback

from ...commands import UserOSError, UserValueError, as_user_errors
from ...files import check_files, damaged_files_named
from ...model.checkpoint_files import stored_dtype
from ...model.modeling_gumiho import GumihoModel
from .. import (
    CachedFeatures,
    FeatureDataset,
    GumihoTrainer,
    GumihoTrainingArguments,
    last_complete_checkpoint,
    prepare_dataset,
)
from ..data.manifest import Manifest, forced_differences
from ..data.open_text import load_tokenizer as load_tokenizer_of
from ..data.preparation import held_out_numbers
from ..feature_cache import TARGET_FOLDER
from .contents import training_contents
from .context import RunContext, unsplit_models
from .progress import Bar, Progress, is_no_mismatch
from .target import load_tokenizer, say


class Training:
    """
    The trainings of a run. They leave the drafter, its tokenizer and its card in its folder. `data` holds arguments of
    the trainer, and is `made_from` these contents. `load_source` gives the target or its cached features. It is called
    only if there is anything to train.
    """

    def __init__(
        self,
        run: RunContext,
        data: dict[str, Any],
        load_source: Callable[[], PreTrainedModel | CachedFeatures],
        made_from: dict[str, Any] | None = None,
    ):
        self.run, self.data, self.load_source, self.made_from = run, data, load_source, made_from or {}

    def train(self) -> None:
        """
        Trains the phases one after the other. A phase that was stopped continues from its newest checkpoint, one that
        is finished is left as it is, and each begins with the best drafter of the one before it.
        """
        args, folder, phases = self.run.args, self.run.folder, self.run.phases
        finished, start, trainer = Manifest(folder / "work", "drafter"), args.drafter, None
        for number, (name, planned) in enumerate(phases.items(), 1):
            training_args = self._fit_to_data(planned)
            manifest = Manifest(training_args.output_dir)
            contents = self.made_from | training_contents(self.run, training_args, start)
            is_longer = _is_longer(manifest, contents, training_args, name)
            PartialState().wait_for_everyone()
            if not is_longer and is_there(training_args):
                say(f"{name}: finished before")
            else:
                if self.run.is_main:
                    finished.write({})
                    manifest.write(contents | _length_of(training_args))
                    for later in list(phases)[number:]:  # they began with what this one was before
                        shutil.rmtree(folder / "work" / later, ignore_errors=True)
                trainer = None  # that of the phase before, whose memory this one needs
                trainer = self._train_phase(f"{name} {number}/{len(phases)}", training_args, start)
            start = training_args.output_dir
        how = {"calibrate": args.calibrate, "num_eval_rows": args.num_eval_rows, "phases": [*phases]}
        has_drafter = any(folder.glob("*model*.safetensors"))
        if trainer is None and has_drafter and finished.is_finished and finished.made_from == how:
            check_files(folder, {})
            return
        # There is no trainer where the run was stopped after its last phase.
        trainer = trainer or self._trainer(name, training_args, start, _state_in(training_args.output_dir))
        if self.run.is_main:
            for stage in ("tune", "evaluate"):  # of an earlier drafter
                shutil.rmtree(folder / "work" / stage, ignore_errors=True)
        self._finish(trainer, training_args)
        trainer.accelerator.wait_for_everyone()
        if self.run.is_main:
            finished.write(how, is_finished=True)

    def try_step(self, training_args: GumihoTrainingArguments, num_tokens: int) -> None:
        """Trains a step of one pass of this many tokens in each process, and keeps nothing."""
        changes: dict[str, Any] = dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "no")
        changes |= dict.fromkeys(("load_best_model_at_end", "eval_on_start", "linear_start"), False)
        changes |= {"max_steps": 1, "report_to": [], "disable_tqdm": True, "dataloader_num_workers": 0}
        changes |= {"dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}
        tried = replace(training_args, **changes)
        if tried.tokens_per_step is not None:
            # Rounded lengths, by which rows meet in a step, are larger.
            tried.tokens_per_step, tried.tokens_per_pass = 2 * num_tokens * tried.world_size, num_tokens
        trainer = self._trainer("trial", tried, self.run.args.drafter)
        try:
            trainer.train()
        finally:
            trainer.accelerator.free_memory()

    def _train_phase(self, phase: str, training_args: GumihoTrainingArguments, start: str | None) -> GumihoTrainer:
        set_seed(training_args.seed)
        checkpoint = last_complete_checkpoint(training_args.output_dir)
        state = _state_in(checkpoint) if checkpoint else None
        if state is not None and _has_ended(state, training_args):
            # It was stopped before its result was kept.
            best = Path(training_args.output_dir) / f"checkpoint-{state.best_global_step}"
            trainer = self._trainer(phase, training_args, str(best) if best.is_dir() else checkpoint, state)
        else:
            trainer = self._trainer(phase, training_args, start)
            if checkpoint:
                say(f"{phase.split()[0]}: continues from {checkpoint}")
            trainer.train(resume_from_checkpoint=checkpoint)
        if not _has_ended(trainer.state, training_args):
            raise KeyboardInterrupt(
                f"{phase}: stopped after step {trainer.state.global_step} of {trainer.state.max_steps}. Run the same "
                f"command again: it continues here."
            )
        if trainer.state.best_global_step == 0:
            say(f"{phase}: nothing was better than the drafter to begin with, which stays")
        trainer.save_model()  # the training's result is kept, whatever becomes of what follows
        trainer.save_state()
        trainer.accelerator.wait_for_everyone()
        return trainer

    def _trainer(
        self, phase: str, training_args: GumihoTrainingArguments, start: str | None, state: TrainerState | None = None
    ) -> GumihoTrainer:
        """Returns the trainer of a phase that begins with the drafter `start`, or has ended in it with a `state`."""
        source, fields = self.load_source(), self.run.fields
        with unsplit_models(training_args), as_user_errors():
            # In float32: mixed precision is the trainer's affair.
            if start is not None:
                drafter = GumihoModel.from_pretrained(start, dtype=torch.float32, **fields)
            elif isinstance(source, CachedFeatures):
                drafter = source.make_drafter(**fields).float()
            else:
                drafter = GumihoModel.from_target(source, **fields).float()
        progress = Progress(phase)
        trainer = GumihoTrainer(drafter, training_args, target=source, callbacks=[progress], **self.data)
        trainer.remove_callback(PrinterCallback)
        if trainer.pop_callback(ProgressCallback) is not None and sys.stderr.isatty():
            trainer.add_callback(Bar)
        # The run's own manifest compares it with its checkpoint.
        logging.getLogger("transformers.trainer_utils").addFilter(is_no_mismatch)
        progress.trainer = trainer
        trainer.state = state or trainer.state
        return trainer

    def _fit_to_data(self, planned: GumihoTrainingArguments) -> GumihoTrainingArguments:
        """Returns a phase's arguments, without evaluations where no rows are held out."""
        num_rows = len(self.data["train_dataset"])
        rows_per_pass = planned.world_size * planned.train_batch_size
        if planned.dataloader_drop_last and planned.tokens_per_step is None and num_rows < rows_per_pass:
            raise UserValueError(
                f"--dataloader_drop_last drops all {num_rows} rows, as a batch has {rows_per_pass}. Leave it out, or "
                f"lower --per_device_train_batch_size."
            )
        changes: dict[str, Any] = {}
        if self.data["eval_dataset"] is None:
            say("no held-out rows: the last checkpoint is the drafter, and no draft temperatures are fitted")
            changes = {"eval_strategy": "no", "load_best_model_at_end": False, "eval_on_start": False}
        # Made anew, as accelerate takes DeepSpeed's plug-in of the newest arguments alone.
        return replace(planned, **changes)

    def _finish(self, trainer: GumihoTrainer, training_args: GumihoTrainingArguments) -> None:
        """
        Calibrates and evaluates the drafter, and saves it with a card: in the target's precision, or in its own where
        it was only added to.
        """
        args, folder = self.run.args, self.run.folder
        if trainer.eval_dataset is not None:
            if args.calibrate and (temperatures := trainer.calibrate()):
                say(f"draft temperatures: {temperatures}")
            trainer.save_metrics("eval", trainer.evaluate())
        if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            # Trained in float32, used next to the target.
            name = str(trainer.target_features.config.dtype).removeprefix("torch.")
            dtype = getattr(torch, name, torch.float32)
            if args.drafter is not None and training_args.train_only in ("parallel", "transition"):
                dtype = stored_dtype(args.drafter, {})
            trainer.model.to(dtype)
        trainer.save_model(str(folder))
        training_args.output_dir = str(folder)  # where the card goes, which names the folder
        trainer.create_model_card(
            model_name=training_args.hub_model_id,
            finetuned_from=args.target,
            dataset=None if args.writes_prompts else args.data,
            phases=[*self.run.phases],
            forced=forced_differences(folder / "work"),
        )


def _state_in(folder: str) -> TrainerState:
    return TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME))


def _has_ended(state: TrainerState, training_args: GumihoTrainingArguments) -> bool:
    """Returns whether a state is the last one of a training, which may have become longer since."""
    if training_args.max_steps > 0:
        return state.global_step >= training_args.max_steps
    return state.global_step >= state.max_steps and (state.epoch or 0) >= training_args.num_train_epochs


def is_there(training_args: GumihoTrainingArguments) -> bool:
    """Returns whether the result of a phase is there: its state is that of the last step, its weights can be read."""
    folder = Path(training_args.output_dir)
    if not (folder / TRAINER_STATE_NAME).exists() or not any(folder.glob("*.safetensors")):
        return False
    try:
        check_files(folder, {}, "*.safetensors")
    except UserOSError:
        return False
    with damaged_files_named(folder):
        return _has_ended(_state_in(str(folder)), training_args)


def _length_of(training_args: GumihoTrainingArguments) -> dict[str, float]:
    return {"max_steps": training_args.max_steps, "num_train_epochs": training_args.num_train_epochs}


def _is_longer(
    manifest: Manifest, contents: dict[str, Any], training_args: GumihoTrainingArguments, name: str
) -> bool:
    """Returns whether a phase is to be longer than it was; raises `ValueError` where anything else has changed."""
    now = _length_of(training_args)
    before = {key: value for key, value in manifest.made_from.items() if key in now}
    counts_steps = before.get("max_steps", -1) > 0
    if any(now[key] < value for key, value in before.items()) or counts_steps != (now["max_steps"] > 0):
        contents = contents | now
    manifest.check(
        contents, f"Give these values again, begin anew with --restart {name}, or choose another --output_dir."
    )
    is_longer = bool(before) and before != now
    if is_longer:
        say(f"{name}: trains on, with the schedule of the longer run ({before}, now {now})")
    return is_longer


def cached_data(folders: list[str], num_eval_rows: float, seed: int, held_out: Path | None = None) -> dict[str, Any]:
    """
    Returns the trainer's arguments for training on feature caches. The rows to evaluate on are `held_out`, a cache, or
    else `num_eval_rows` random ones.
    """
    caches = [FeatureDataset(folder) for folder in folders]
    if len({str(cache.made_from.get("data")) for cache in caches}) < len(caches):
        raise UserValueError("--features names caches of the same texts. Give each of them once.")
    rows: Any = torch.utils.data.ConcatDataset(caches)
    chosen = [] if held_out is not None else held_out_numbers(len(rows), num_eval_rows, seed)
    eval_rows: Any = torch.utils.data.Subset(rows, chosen) if chosen else None
    return {
        "eval_dataset": eval_rows if held_out is None else FeatureDataset(held_out),
        "train_dataset": torch.utils.data.Subset(rows, sorted({*range(len(rows))} - {*chosen})),
        "processing_class": load_tokenizer_of(str(Path(folders[0]) / TARGET_FOLDER), None, None),
    }


def online_data(run: RunContext, rows: Any, held_out: Any) -> dict[str, Any]:
    """Returns the trainer's arguments for training on rows of conversations, of token ids."""
    with run.training_args.main_process_first(desc="preparing the data"):
        train_rows, report = _prepared(run, rows)
        eval_rows = None
        if held_out:
            try:
                eval_rows, of_held_out = _prepared(run, held_out)
                say(f"held-out rows: {of_held_out}")
            except UserValueError as error:
                say(f"held-out rows: {error}\nThe drafter is not evaluated while it trains.")
    say(f"training data: {report}")
    return {"train_dataset": train_rows, "eval_dataset": eval_rows, "processing_class": load_tokenizer(run.args)}


def _prepared(run: RunContext, rows: Any) -> tuple[Any, Any]:
    return prepare_dataset(
        rows, load_tokenizer(run.args), run.target_config, max_length=run.longest_row, packing=bool(run.args.packing),
        num_proc=run.args.num_proc,
    )  # fmt: skip
