"""The training stage: the phases of a recipe, each with a `GumihoTrainer`."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PrinterCallback, TrainerState, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ProgressCallback

from ...commands import UserValueError, as_user_errors
from ...files import check_files, damaged_files_named
from ...model.checkpoint_files import stored_dtype
from ...model.configuration_gumiho import GumihoConfig
from ...model.modeling_gumiho import GumihoModel
from ...model.target_shape import resolve_layer_ids
from .. import (
    CachedFeatures,
    FeatureDataset,
    GumihoTrainer,
    GumihoTrainingArguments,
    last_complete_checkpoint,
    prepare_dataset,
)
from ..checkpoints import has_weights
from ..checks import check_is_trained_here
from ..data.manifest import Manifest, forced_differences
from ..data.open_text import load_tokenizer
from ..data.preparation import held_out_numbers
from ..feature_cache import TARGET_FOLDER
from .arguments import RecipeArguments
from .contents import training_contents
from .options import recipe_of
from .progress import Bar, Progress, without_mismatches
from .target import row_length, say


@dataclass
class Training:
    """
    The trainings of a run. They leave the drafter, its tokenizer and its card in a folder.

    Attributes:
        args: The options.
        fields: Those of the drafter's config that are not the defaults.
        data: Arguments of the trainer, from [`cached_data`] or [`online_data`].
        load_source: Gives the target or its cached features. It is called only if there is anything to train.
        made_from: What the data and the drafter are made from.
        folder: The run's folder.
    """

    args: RecipeArguments
    fields: dict[str, Any]
    data: dict[str, Any]
    load_source: Callable[[], PreTrainedModel | CachedFeatures]
    made_from: dict[str, Any]
    folder: Path

    def run(self, phases: dict[str, GumihoTrainingArguments]) -> None:
        """
        Trains the phases, whose arguments are given by name, one after the other. A phase that was stopped continues
        from its newest checkpoint, one that is finished is left as it is, and each begins with the best drafter of the
        one before it.
        """
        args, work, start, trainer = self.args, self.folder / "work", self.args.drafter, None
        whole, is_main = Manifest(work, "drafter"), PartialState().is_main_process
        for number, (name, planned) in enumerate(phases.items(), 1):
            training_args = self._fit_to_data(planned)
            manifest = Manifest(training_args.output_dir)
            contents = self.made_from | training_contents(training_args, start)
            is_longer = _is_longer(manifest, contents, training_args, name)
            PartialState().wait_for_everyone()
            if not is_longer and is_there(training_args):
                say(f"{name}: finished before")
            else:
                if is_main:
                    whole.write({})
                    manifest.write(contents | _length_of(training_args))
                    for later in list(phases)[number:]:  # they began with what this one was before
                        shutil.rmtree(work / later, ignore_errors=True)
                trainer = None  # that of the phase before, whose memory this one needs
                trainer = self._train(f"{name} {number}/{len(phases)}", training_args, start)
            start = training_args.output_dir
        how = {"calibrate": args.calibrate, "num_eval_rows": args.num_eval_rows, "phases": [*phases]}
        has_drafter = any(self.folder.glob("*model*.safetensors"))
        if trainer is None and has_drafter and whole.is_finished and whole.made_from == how:
            check_files(self.folder, {})
            return
        # There is no trainer where the run was stopped after its last phase.
        trainer = trainer or self._trainer(name, training_args, start, _state_in(training_args.output_dir))
        if is_main:
            for stage in ("tune", "evaluate"):  # of an earlier drafter
                shutil.rmtree(work / stage, ignore_errors=True)
        self._finish(trainer, training_args, [*phases])
        trainer.accelerator.wait_for_everyone()
        if is_main:
            whole.write(how, is_finished=True)

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
        trainer = self._trainer("trial", tried, self.args.drafter)
        try:
            trainer.train()
        finally:
            trainer.accelerator.free_memory()

    def _train(self, phase: str, training_args: GumihoTrainingArguments, start: str | None) -> GumihoTrainer:
        """Trains one phase, and keeps its best drafter and its log."""
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
            with without_mismatches():
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
        source = self.load_source()
        with unsplit_models(training_args):
            drafter = _make_drafter(start, self.fields, source)
        progress = Progress(phase)
        trainer = GumihoTrainer(drafter, training_args, target=source, callbacks=[progress], **self.data)
        trainer.remove_callback(PrinterCallback)
        if trainer.pop_callback(ProgressCallback) is not None and sys.stderr.isatty():
            trainer.add_callback(Bar)
        progress.trainer = trainer
        trainer.state = state or trainer.state
        return trainer

    def _fit_to_data(self, planned: GumihoTrainingArguments) -> GumihoTrainingArguments:
        """Returns a phase's arguments, without evaluations where no rows are held out."""
        rows_per_pass, num_rows = planned.world_size * planned.train_batch_size, len(self.data["train_dataset"])
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

    def _finish(self, trainer: GumihoTrainer, training_args: Any, phases: list[str]) -> None:
        """
        Calibrates and evaluates the drafter, and saves it with a card: in the target's precision, or in its own where
        it was only added to.
        """
        args = self.args
        if trainer.eval_dataset is not None:
            if args.calibrate and (temperatures := trainer.calibrate()):
                say(f"draft temperatures: {temperatures}")
            trainer.save_metrics("eval", trainer.evaluate())
        if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            # Trained in float32, used next to the target.
            name = str(trainer.target_features.config.dtype).removeprefix("torch.")
            is_added_to = args.drafter is not None and training_args.train_only in ("parallel", "transition")
            trainer.model.to(stored_dtype(args.drafter, {}) if is_added_to else getattr(torch, name, torch.float32))
        trainer.save_model(str(self.folder))
        training_args.output_dir = str(self.folder)  # where the card goes, which names the folder
        name, dataset = training_args.hub_model_id, None if args.writes_prompts else args.data
        forced = forced_differences(self.folder / "work")
        trainer.create_model_card(
            model_name=name, finetuned_from=args.target, dataset=dataset, phases=phases, forced=forced
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
    if not (folder / TRAINER_STATE_NAME).exists() or not has_weights(folder):
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
    else `num_eval_rows` random ones, of each cache its part.
    """
    caches = [FeatureDataset(folder) for folder in folders]
    if len({str(cache.made_from.get("data")) for cache in caches}) < len(caches):
        raise UserValueError("--features names caches of the same texts. Give each of them once.")
    rows: Any = torch.utils.data.ConcatDataset(caches)
    chosen: list[int] = []
    for start, cache in zip([0, *rows.cumulative_sizes], caches, strict=False):
        if held_out is None:
            part = [num_eval_rows * end // len(rows) for end in (start, start + len(cache))]
            number = num_eval_rows if num_eval_rows < 1 else part[1] - part[0]
            chosen += [start + row for row in held_out_numbers(len(cache), number, seed)]
    eval_rows: Any = torch.utils.data.Subset(rows, chosen) if chosen else None
    return {
        "eval_dataset": eval_rows if held_out is None else FeatureDataset(held_out),
        "train_dataset": torch.utils.data.Subset(rows, sorted({*range(len(rows))} - {*chosen})),
        "processing_class": load_tokenizer(str(Path(folders[0]) / TARGET_FOLDER), None, None),
    }


def online_data(
    args: RecipeArguments, target_config: Any, tokenizer: Any, rows: Any, held_out: Any, training_args: Any
) -> dict[str, Any]:
    """Returns the trainer's arguments for running the target in every step, on rows of conversations."""
    with training_args.main_process_first(desc="preparing the data"):
        train_rows, report = prepared(args, tokenizer, target_config, rows)
        eval_rows = prepared_held_out(args, tokenizer, target_config, held_out)
    say(f"training data: {report}")
    return {"train_dataset": train_rows, "eval_dataset": eval_rows, "processing_class": tokenizer}


def prepared(args: RecipeArguments, tokenizer: Any, target_config: Any, rows: Any) -> tuple[Any, Any]:
    """Returns rows of token ids, and what became of the data."""
    max_length = row_length(args, target_config)
    return prepare_dataset(
        rows, tokenizer, target_config, max_length=max_length, packing=bool(args.packing), num_proc=args.num_proc
    )


def prepared_held_out(args: RecipeArguments, tokenizer: Any, target_config: Any, rows: Any) -> Any:
    """Returns the held-out rows, of token ids; `None` where there are none, or none can be used."""
    if not rows:
        return None
    try:
        dataset, report = prepared(args, tokenizer, target_config, rows)
    except UserValueError as error:
        say(f"held-out rows: {error}\nThe drafter is not evaluated while it trains.")
        return None
    say(f"held-out rows: {report}")
    return dataset


def _make_drafter(
    start: str | None,
    fields: dict[str, Any],
    source: PreTrainedModel | CachedFeatures,
) -> GumihoModel:
    """Returns the drafter to train, or that is trained, in float32: mixed precision is the trainer's affair."""
    fields = resolved(fields, source.config)
    if start is not None:
        with as_user_errors():
            return GumihoModel.from_pretrained(start, dtype=torch.float32, **fields)
    if isinstance(source, CachedFeatures):
        return source.make_drafter(**fields).float()
    return GumihoModel.from_target(source, **fields).float()


def drafter_fields(args: RecipeArguments) -> dict[str, Any]:
    """Returns the fields of the drafter's config that the options and the recipe decide."""
    names = ("num_parallel_heads", "transition_rank", "target_layer_ids")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.drafter is None:
        return recipe_of(args)["config"] | given
    with as_user_errors():
        own = GumihoConfig.from_pretrained(args.drafter)
        check_is_trained_here(own)
    if args.num_parallel_heads is None or own.num_parallel_heads:
        return given
    # An EAGLE head gets its first parallel heads: they begin where a Gumiho drafter's do.
    new = {"num_serial_tokens": min(own.num_serial_tokens, GumihoConfig.num_serial_tokens)}
    return recipe_of(args)["config"] | new | given


def resolved(fields: dict[str, Any], target_config: Any) -> dict[str, Any]:
    """Returns fields of a drafter's config, with `target_layer_ids` counted from 0."""
    if (layers := fields.get("target_layer_ids")) is None:
        return fields
    return fields | {"target_layer_ids": resolve_layer_ids(target_config, layers)}


@contextmanager
def unsplit_models(args: GumihoTrainingArguments) -> Iterator[None]:
    """Keeps DeepSpeed's ZeRO-3 from splitting models as they are made: the trainer splits the drafter alone."""
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if args.deepspeed_plugin is not None:
            args.deepspeed_plugin.set_deepspeed_weakref()
