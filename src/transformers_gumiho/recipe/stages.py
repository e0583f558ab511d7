"""The stages of `gumiho train`: what each does, and which of them are finished."""

import gc
import json
import shutil
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoConfig, PreTrainedModel

from ..model.configuration_gumiho import GumihoConfig, resolve_layer_ids
from ..resumable_file import Record
from ..training import (
    CachedFeatures,
    GumihoTrainingArguments,
    cache_size,
    load_conversations,
    prepare_dataset,
    write_feature_cache,
)
from ..training.data.usable_rows import split_rows
from ..training.feature_cache import MADE_FROM, row_lengths
from ..training.fingerprint import checkpoint_fingerprint, file_fingerprint
from ..user_errors import UserValueError, as_user_errors
from .arguments import STAGES, RecipeArguments
from .measure import evaluate_drafter, tune_drafter
from .plan import ANSWER_SHARE, caching_pays, check_fits, describe, estimate, tau_to_expect
from .recipes import RECIPES
from .records import cached_contents, rows_contents, target_contents, writing_contents
from .training import cached_data, online_data, prepared, prompt_of, train_phases, unsplit_models
from .writing import load_rows, load_target, load_tokenizer, write_answers


_SAMPLE = 256  # rows whose tokens the plan counts
_PATIENCE = 1.0  # seconds between two looks at what the main process does


class Run:
    """
    One run of `gumiho train`. Everything but the drafter itself lies in `work/` within its folder.

    Args:
        args: The options.
        phases: Training arguments by the name of the phase.
        folder: Receives the drafter.
    """

    def __init__(self, args: RecipeArguments, phases: dict[str, GumihoTrainingArguments], folder: Path):
        self.args, self.phases, self.folder, self.work = args, phases, folder, folder / "work"
        self.training_args = next(iter(phases.values()))
        self.is_main = self.training_args.process_index == 0
        self.answers = self.work / "answers.jsonl"
        self._target: PreTrainedModel | None = None
        recipe = RECIPES[args.recipe]
        given = {"transition_rank": args.transition_rank, "target_layer_ids": args.target_layer_ids}
        new = recipe.config if args.drafter is None else {}
        self.fields = new | {name: value for name, value in given.items() if value is not None}
        self.has_begun = (self.work / MADE_FROM).exists()

    @property
    def target(self) -> PreTrainedModel:
        """The target, loaded when it is first needed."""
        if self._target is None:
            with unsplit_models(self.training_args):
                self._target = load_target(self.args)
        return self._target

    @cached_property
    def target_contents(self) -> dict[str, Any]:
        """Fingerprints of the target and its tokenizer."""
        with as_user_errors():
            return target_contents(self.args, load_tokenizer(self.args))

    @cached_property
    def rows_contents(self) -> dict[str, Any]:
        """What the training's rows are made from."""
        rows = None if self.args.regenerate else self._rows()
        return self.target_contents | rows_contents(self.args, self.answers, rows, self.training_args.seed)

    @cached_property
    def _cache_contents(self) -> dict[str, Any]:
        """What a cache of the states is made from."""
        args = self.args
        layers = args.target_layer_ids
        if layers is not None:
            layers = resolve_layer_ids(self.target_config, layers)
        return self.rows_contents | {"dtype": args.features_dtype, "target_layer_ids": layers}

    @cached_property
    def target_config(self) -> Any:
        """The target's config."""
        with as_user_errors():
            return AutoConfig.from_pretrained(self.args.target)

    def _rows(self) -> Any:
        """Returns the rows of the data that can be used; `None` where the target writes its own questions."""
        args = self.args
        if args.writes_prompts:
            return None
        return load_rows(args, load_tokenizer(args), self.target_config, answered=not args.regenerate)[0]

    def release_target(self) -> None:
        """Lets the target go, so that a process never holds two."""
        self._target = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def forget(self, stage: str) -> None:
        """Removes the results of a stage, or of a phase of the training, and of those after it."""
        order = ["write", "features", "train", *self.phases, "tune", "evaluate"]
        if stage not in order:
            raise UserValueError(f"--restart must be one of {', '.join(order)}, got {stage!r}.")
        if self.is_main:
            for later in order[order.index(stage) :]:
                shutil.rmtree(self.work / later, ignore_errors=True)
            if stage == "write":
                for path in self.work.glob("answers*"):
                    path.unlink()
            if stage in ("write", "features"):
                shutil.rmtree(self.work / "held_out", ignore_errors=True)
                (self.work / MADE_FROM).unlink(missing_ok=True)
        PartialState().wait_for_everyone()
        self.has_begun = (self.work / MADE_FROM).exists()

    def plan(self) -> None:
        """
        Prints what the run will take, and decides whether states are kept. Raises `OSError` where the disk has no room
        for it, and `ValueError` where a device has too little memory.
        """
        args, phases = self.args, list(self.phases.values())
        if args.features is not None:
            return
        rows, target_config = self._rows(), self.target_config
        config = GumihoConfig.from_target(target_config, **self.fields)
        num_rows, length = self._row_length(rows, target_config)
        needs = estimate(args, phases, target_config, config, num_rows, length)
        if args.cache_features == "auto":
            reason = caching_pays(args, phases, sum(need.disk for need in needs.values()), self.folder)
            args.cache_features = "false" if reason else "true"
            self._say(f"states: {f'the target runs in every step, as {reason}' if reason else 'kept on the disk'}")
            needs = estimate(args, phases, target_config, config, num_rows, length)
        self._say(f"{describe(needs)}\n{num_rows:,} rows of data, {length:.0f} tokens each")
        self._say(f"optimizer: {'Muon for matrices, AdamW' if phases[0].muon else phases[0].optim.value}")
        if (expected := tau_to_expect(target_config)) is not None:
            self._say(expected)
        if not args.ignore_plan:
            check_fits(needs, self.folder, self.training_args.device, args.device_map is not None)

    def _row_length(self, rows: Any, target_config: Any) -> tuple[int, float]:
        """Returns the number of rows, and the tokens of one: those of some rows with answers, or else of prompts."""
        args = self.args
        if rows is None:
            return args.num_prompts, (args.max_prompt_tokens + args.max_new_tokens) * ANSWER_SHARE
        sample, tokenizer = rows.select(range(0, len(rows), max(len(rows) // _SAMPLE, 1))), load_tokenizer(args)
        if args.regenerate:
            prompts = [str((prompt_of(row) or row).get("prompt") or "") for row in sample]
            tokens = sum(len(tokenizer(prompt)["input_ids"]) for prompt in prompts) / len(prompts)
            return len(rows), min(tokens + ANSWER_SHARE * args.max_new_tokens, args.max_length)
        encoded, _ = prepare_dataset(sample, tokenizer, target_config, max_length=args.max_length, packing=False)
        lengths = row_lengths(encoded) or [0]
        return len(rows), sum(lengths) / len(lengths)

    def run(self) -> None:
        """Runs the stages that are not finished."""
        chosen = [stage for stage in STAGES if stage in self.args.stages]
        self._choose_source()
        steps: dict[str, Callable[[], None]] = {
            "write": self.write, "features": self.write_features, "train": self.train, "tune": self.tune,
            "evaluate": self.evaluate,
        }  # fmt: skip
        for number, stage in enumerate(chosen, 1):
            self._say(f"[{number}/{len(chosen)}] {stage}")
            steps[stage]()
            PartialState().wait_for_everyone()

    def _choose_source(self) -> None:
        """Takes the source of states that the run began with, or records it."""
        record, args = Record(self.work / MADE_FROM), self.args
        if not {"features", "train"} & set(args.stages):
            return
        if args.cache_features == "auto":
            args.cache_features = str(record.made_from.get("cache_features", "true"))
        if "features" not in args.stages and not (self.work / "features").exists():
            args.cache_features = "false"
        made_from = {"cache_features": args.cache_features}
        if args.features is None:
            record.check(made_from, "Give this value again, or begin anew with --restart features.")
        PartialState().wait_for_everyone()
        if self.is_main:
            record.write(made_from)

    def write(self) -> None:
        """Lets the target answer."""
        args, seed = self.args, self.training_args.seed
        if args.features is not None or not args.regenerate:
            return
        rows = self._rows()
        contents = {} if args.endpoint is not None else self.target_contents
        contents = contents | writing_contents(args, load_tokenizer(args), rows, seed)

        def write() -> None:
            target = None if args.endpoint is not None else self.target
            write_answers(args, load_tokenizer(args), self.answers, seed, target)

        if not self.answers.exists():
            shutil.rmtree(self.work / "write", ignore_errors=True)
        self._once("write", contents, write, alone=False)

    def write_features(self) -> None:
        """Runs the target once over the answers, and keeps its states."""
        args = self.args
        if args.features is not None or args.cache_features == "false":
            return
        contents = self._cache_contents
        parts = [(name, rows) for name, rows in zip(("features", "held_out"), self._split(), strict=True) if rows]
        records = [Record(self.work / name / MADE_FROM) for name, _ in parts]
        for record in records:
            record.check(contents, "Give these values again, or begin anew with --restart features.")
        PartialState().wait_for_everyone()
        if all(record.is_finished for record in records):
            self._say("features: finished before")
            return
        tokenizer, dtype = load_tokenizer(args), getattr(torch, args.features_dtype)
        for name, rows in parts:
            with self.training_args.main_process_first(desc="preparing the data"):
                dataset, report = prepared(args, tokenizer, self.target.config, rows)
            size = cache_size(dataset, self.target.config, dtype, args.target_layer_ids)
            self._say(f"{name}: {report}\n{name}: {size / 1e9:.2f} GB in {self.work / name}")
            write_feature_cache(
                dataset, self.target, tokenizer, self.work / name, dtype=dtype, target_layer_ids=args.target_layer_ids,
                tokens_per_batch=args.features_batch_tokens, made_from=contents,
            )  # fmt: skip

    def train(self) -> None:
        """Trains the drafter."""
        args, contents = self.args, {}
        if args.features is not None:
            folders, contents = args.features, cached_contents(args.features, args.num_eval_rows)
            data = cached_data(folders, args.num_eval_rows, seed=self.training_args.seed)
        elif args.cache_features == "true":
            self.release_target()  # its memory is the training's
            folders, contents = [str(self.work / "features")], self._cache_contents
            has_held_out = (self.work / "held_out" / "cache.json").exists()
            data = cached_data(folders, 0, self.work / "held_out" if has_held_out else None)
        else:
            folders, contents = [], self.rows_contents
            data = online_data(args, self.target_config, load_tokenizer(args), *self._split(), self.training_args)
        self._limit_vocabulary()
        train_phases(
            args, self.phases, self.fields, data,
            lambda: CachedFeatures(folders[0]) if folders else self.target, contents, self.folder,
        )  # fmt: skip
        self.release_target()

    def tune(self) -> None:
        """Finds the fastest decoding settings for this machine."""
        if self._can_measure("tune"):
            num_prompts = len(self._prompts())
            self._measure("tune", lambda: tune_drafter(self.args, self.folder, self._prompt_file, num_prompts))

    def evaluate(self) -> None:
        """Compares the drafter with plain decoding and prompt lookup, and adds the table to its card."""
        if self._can_measure("evaluate"):
            self._measure("evaluate", lambda: evaluate_drafter(self.args, self.folder, self._prompt_file))

    def _measure(self, stage: str, measure: Callable[[], str]) -> None:
        self.release_target()
        args = self.args
        contents = {
            "drafter": checkpoint_fingerprint(self.folder),
            "prompts": file_fingerprint(self._prompt_file),
            "measured_new_tokens": args.measured_new_tokens,
            "target_dtype": args.target_dtype,
        }
        self._once(stage, contents, lambda: self._say(measure()))
        gc.collect()

    def _once(self, stage: str, contents: dict[str, Any], work: Callable[[], None], alone: bool = True) -> None:
        """
        Does the work of a stage unless it is finished, `alone` in the main process. The others then wait as long as it
        takes, which may be longer than a barrier waits.
        """
        record = Record(self.work / stage / MADE_FROM)
        record.check(contents, f"Give these values again, or begin anew with --restart {stage}.")
        if record.is_finished:
            self._say(f"{stage}: finished before")
            return
        PartialState().wait_for_everyone()
        if self.is_main:
            record.write(contents)
        if self.is_main or not alone:
            work()
        if not alone:
            PartialState().wait_for_everyone()
        if self.is_main:
            record.write(contents, is_finished=True)
        while not Record(record.path).is_finished:
            time.sleep(_PATIENCE)

    @property
    def _prompt_file(self) -> Path:
        return self.work / "prompts.jsonl"

    def _can_measure(self, stage: str) -> bool:
        args = self.args
        missing = "--target" if args.target is None else "--data" if args.features is not None else None
        if args.lora_rank:
            missing = "a drafter that is no adapter"
        if missing is None and not self._prompts():
            missing = "prompts, and no row is held out"
        if missing is not None:
            self._say(f"{stage}: left out, because it needs {missing}")
        return missing is None

    def _prompts(self) -> list[dict[str, Any]]:
        """Returns prompts of the rows that are held out, which it writes into a file."""
        held_out = self._split()[1]
        prompts = [row for row in map(prompt_of, held_out if held_out is not None else []) if row is not None]
        prompts = prompts[: self.args.num_measured_prompts]
        if self.is_main:
            self._prompt_file.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
        PartialState().wait_for_everyone()
        return prompts

    def _split(self) -> tuple[Any, Any]:
        """Returns the rows to train on and those to hold out, `None` where these are none."""
        args = self.args
        if args.regenerate:
            rows = load_conversations(str(self.answers))  # a line for each row of the data, so the split is theirs
        else:
            rows, report = load_rows(args, load_tokenizer(args), self.target_config, answered=True)
            self._say(report)
        return split_rows(rows, args.num_eval_rows, self.training_args.seed)

    def _limit_vocabulary(self) -> None:
        share = RECIPES[self.args.recipe].vocabulary_share
        if share == 1 or self.args.drafter is not None:
            return
        source = self.args.target if self.args.features is None else Path(self.args.features[0]) / "target"
        vocab_size = AutoConfig.from_pretrained(source).get_text_config(decoder=True).vocab_size
        for phase in self.phases.values():
            if phase.draft_vocabulary_size is None:
                phase.draft_vocabulary_size = int(vocab_size * share)

    def _say(self, text: str) -> None:
        if self.is_main:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
