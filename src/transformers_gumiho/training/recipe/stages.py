"""The stages of `gumiho train`: what each does, and which of them are finished."""

import gc
import json
import shutil
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoConfig, PreTrainedModel

from ...commands import UserFileNotFoundError, UserValueError, as_user_errors
from ...files import damaged_files_named
from ...model.configuration_gumiho import GumihoConfig
from ...model.target_shape import TargetLayers, state_width
from .. import (
    CachedFeatures,
    GumihoTrainingArguments,
    cache_size,
    load_conversations,
    prepare_dataset,
    write_feature_cache,
)
from ..data.conversations import first_question
from ..data.fingerprint import checkpoint_fingerprint, file_fingerprint
from ..data.manifest import MADE_FROM, Manifest
from ..data.open_text import encode_turn
from ..data.preparation import size_of_prompts, split_rows
from ..data.run_files import ask_before_deleting
from ..feature_cache import TARGET_FOLDER, FeatureDataset, is_complete, layer_fields, row_lengths
from ..feature_extraction import DEFAULT_BATCH_TOKENS
from ..writing.local import own_settings
from .arguments import STAGES, RecipeArguments
from .plan import ANSWER_SHARE, caching_pays, check_fits, describe, estimate
from .recipes import RECIPES
from .records import cached_contents, drafter_contents, rows_contents, target_contents, writing_contents
from .training import (
    Training,
    cached_data,
    drafter_fields,
    online_data,
    prepared,
    prepared_held_out,
    resolved,
    unsplit_models,
)
from .writing import (
    generation_config,
    load_rows,
    load_target,
    load_tokenizer,
    num_positions,
    row_length,
    say,
    write_answers,
)


_SAMPLE = 256  # rows whose tokens the plan counts
_PATIENCE = 1.0  # seconds between two looks at what the main process does


# Takes the options, the drafter's folder, a file of prompts, and their number.
Measures = Mapping[str, Callable[[RecipeArguments, Path, Path, int], str]]


class Run:
    """
    One run of `gumiho train`. Everything but the drafter itself lies in `work/` within its folder.

    Args:
        args: The options.
        phases: Training arguments by the name of the phase.
        folder: Receives the drafter.
        measures: Does the stages `tune` and `evaluate`, by their names, and returns what it found in words.
        rates: Gives learning rates by what is trained, for a width of the target; none where those of `phases` hold.
    """

    def __init__(
        self,
        args: RecipeArguments,
        phases: dict[str, GumihoTrainingArguments],
        folder: Path,
        measures: Measures,
        rates: Callable[[int], dict[str, float]] = lambda width: {},
    ):
        self.rates = rates
        self.args, self.phases, self.folder, self.work = args, phases, folder, folder / "work"
        self.measures = measures
        self.training_args = next(iter(phases.values()))
        self.is_main = self.training_args.process_index == 0
        self.answers, self.prompt_file = self.work / "answers.jsonl", self.work / "prompts.jsonl"
        self._target: PreTrainedModel | None = None
        self.fields = drafter_fields(args)
        self.has_begun = (self.work / MADE_FROM).exists()
        if args.drafter is not None:  # whose positions may be fewer than the target's
            args.max_length = min(args.max_length, self.drafter_config.get_text_config().max_position_embeddings)

    @property
    def target(self) -> PreTrainedModel:
        """The target, loaded when it is first needed."""
        if self._target is None:
            with unsplit_models(self.training_args):
                self._target = load_target(self.args)
        return self._target

    def release_target(self) -> None:
        """Lets the target go, so that a process never holds two."""
        self._target = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @cached_property
    def target_config(self) -> Any:
        """The target's config."""
        folders = self.args.features
        name = Path(folders[0]) / TARGET_FOLDER if folders else self.args.target
        with as_user_errors(), damaged_files_named(name):
            return AutoConfig.from_pretrained(name)

    @cached_property
    def drafter_config(self) -> GumihoConfig:
        """The config of the drafter."""
        if self.args.drafter is None:
            return GumihoConfig.from_target(self.target_config, **self.fields)
        with as_user_errors():
            return GumihoConfig.from_pretrained(self.args.drafter, **resolved(self.fields, self.target_config))

    @property
    def layers(self) -> TargetLayers | None:
        """The target's layers that the drafter reads, if not the last states alone."""
        return self.drafter_config.layers_read(self.target_config)

    @cached_property
    def target_contents(self) -> dict[str, Any]:
        """Fingerprints of the target and its tokenizer."""
        with as_user_errors():
            return target_contents(self.args, load_tokenizer(self.args))

    @cached_property
    def rows_contents(self) -> dict[str, Any]:
        """What the training's rows are made from."""
        rows = None if self.args.regenerate else self.rows
        return self.target_contents | rows_contents(self.args, self.answers, rows, self.training_args.seed)

    @cached_property
    def cache_contents(self) -> dict[str, Any]:
        """What a cache of the states is made from."""
        return self.rows_contents | {"dtype": self.args.features_dtype, **layer_fields(self.layers)}

    @cached_property
    def rows(self) -> Any:
        """The rows of the data that can be used; `None` where the target writes its own questions."""
        args = self.args
        if args.writes_prompts:
            return None
        rows, report = load_rows(
            args, load_tokenizer(args), self.target_config, answered=not args.regenerate, num_proc=args.num_proc
        )
        say(report)
        return rows

    def forget(self, stage: str) -> None:
        """
        Removes the results of a stage, or of a phase of the training, and of those after it. It says what it deletes,
        and asks, unless `--yes` is given; raises `ValueError` without a terminal to ask in.
        """
        order = [*dict.fromkeys(["write", "features", "train", *self.phases, "tune", "evaluate"])]
        if stage not in order:
            raise UserValueError(f"--restart must be one of {', '.join(order)}, got {stage!r}.")
        names = order[order.index(stage) :]
        names += ["answers*"] * (stage == "write") + ["held_out", MADE_FROM] * (stage in ("write", "features"))
        found = [path for name in names for path in sorted(self.work.glob(name))]
        if found and not self.args.yes:
            self._ask_before_deleting(found)
        for path in found if self.is_main else ():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        PartialState().wait_for_everyone()
        self.has_begun = (self.work / MADE_FROM).exists()

    def _ask_before_deleting(self, found: list[Path]) -> None:
        listed = ", ".join(f"{path.relative_to(self.folder)} ({_bytes_of(path) / 1e6:,.1f} MB)" for path in found)
        ask_before_deleting(f"--restart {self.args.restart} deletes {listed}", self.training_args.world_size == 1)

    def plan(self) -> None:
        """
        Prints what the run will take, and decides whether states are kept. Raises `OSError` where the disk has no room
        for it, and `ValueError` where a device has too little memory.
        """
        args, phases = self.args, list(self.phases.values())
        num_rows, length = self._size_of_data()
        self._fit_to_target()
        measures = self.target_config, self.drafter_config, num_rows, length
        needs = estimate(args, phases, *measures)
        if args.cache_features == "auto" and args.features is None:
            # What extracts states without training is to keep them.
            keeps = "features" in args.stages and "train" not in args.stages
            disk = sum(need.disk for need in needs.values())
            reason = "" if keeps else caching_pays(args, phases, disk, self.folder)
            args.cache_features = "false" if reason else "true"
            say(f"states: {f'the target runs in every step, as {reason}' if reason else 'kept on the disk'}")
            needs = estimate(args, phases, *measures)
        say(f"{describe(needs)}\n{num_rows:,} rows of data, {length:.0f} tokens each")
        say(f"optimizer: {'Muon for matrices, AdamW' if phases[0].muon else phases[0].optim.value}")
        if not args.ignore_plan:
            check_fits(needs, self.folder, self.training_args.device, args.device_map is not None)

    def _fit_to_target(self) -> None:
        """Gives phases what the target decides: the learning rate, and a new drafter's share of the tokens."""
        config = self.target_config.get_text_config(decoder=True)
        rates = self.rates(state_width(config))
        share = RECIPES[self.args.recipe].vocabulary_share if self.args.drafter is None else 1
        for phase in self.phases.values():
            if rates:
                has_heads_alone = phase.train_only in ("parallel", "transition")
                kind = "heads" if has_heads_alone else "new" if self.args.drafter is None else "further"
                phase.learning_rate = rates[kind]
            if share < 1 and phase.draft_vocabulary_size is None:
                phase.draft_vocabulary_size = int(config.vocab_size * share)

    def _size_of_data(self) -> tuple[int, float]:
        """Returns the number of rows, and the tokens of one: those of some rows with answers, or else of prompts."""
        args = self.args
        if args.features is not None:
            lengths = [length for folder in args.features for length in FeatureDataset(folder).lengths]
            return len(lengths), sum(lengths) / len(lengths)
        rows = self.rows
        if rows is None:
            return args.num_prompts, (args.max_prompt_tokens + args.max_new_tokens) * ANSWER_SHARE
        sample, tokenizer = rows.select(range(0, len(rows), max(len(rows) // _SAMPLE, 1))), load_tokenizer(args)
        max_length = row_length(args, self.target_config)
        if args.regenerate:
            size = size_of_prompts(rows, ANSWER_SHARE * args.max_new_tokens, max_length)
            return size.num_rows, size.num_tokens / size.num_rows
        encoded, _ = prepare_dataset(sample, tokenizer, self.target_config, max_length=max_length, packing=False)
        lengths = row_lengths(encoded) or [0]
        return len(rows), sum(lengths) / len(lengths)

    def run(self) -> None:
        """Runs the stages that are not finished."""
        chosen = [stage for stage in STAGES if stage in self.args.stages]
        if self.args.features is None and self.args.regenerate and "write" not in chosen and not self.answers.exists():
            raise UserFileNotFoundError(f"{str(self.work)!r} holds no answers yet. Add write to --stages.")
        if {"features", "train"} & set(chosen):
            self._choose_source()
        steps = {"write": self.write, "features": self.write_features, "train": self.train}
        for number, stage in enumerate(chosen, 1):
            say(f"[{number}/{len(chosen)}] {stage}")
            steps.get(stage, partial(self.measure, stage))()
            PartialState().wait_for_everyone()

    def _choose_source(self) -> None:
        """Takes the source of states that the run began with, or records it."""
        manifest, args = Manifest(self.work), self.args
        if args.cache_features == "auto":
            args.cache_features = str(manifest.made_from.get("cache_features", "true"))
        if "features" not in args.stages and not (self.work / "features").exists():
            args.cache_features = "false"
        made_from = {"cache_features": args.cache_features}
        if args.features is None:
            manifest.check(made_from, "Give this value again, or begin anew with --restart features.")
        PartialState().wait_for_everyone()
        if self.is_main:
            manifest.write(made_from)

    def write(self) -> None:
        """Lets the target answer."""
        args, seed = self.args, self.training_args.seed
        if args.features is not None or not args.regenerate:
            return
        contents = {} if args.endpoint is not None else self.target_contents
        contents = contents | writing_contents(args, load_tokenizer(args), self.rows, seed)
        manifest = Manifest(self.work, self.answers.name)
        if self._is_finished(manifest, contents, "write") and self.answers.exists():
            say("write: finished before")
            return
        target, budget = None if args.endpoint is not None else self.target, self.training_args.pass_budget
        write_answers(args, load_tokenizer(args), self.answers, seed, self.rows, target, budget, contents)

    def write_features(self) -> None:
        """Runs the target once over the answers, and keeps its states."""
        args = self.args
        if args.features is not None or args.cache_features == "false":
            return
        contents, (trained, held_out) = self.cache_contents, self._split()
        is_finished = self._is_finished(Manifest(self.work / "features"), contents, "features")
        folders = [folder for folder in (self.work / "features", self.work / "held_out") if folder.exists()]
        if is_finished and all(map(is_complete, folders)):
            say("features: finished before")
            return
        tokenizer, dtype = load_tokenizer(args), getattr(torch, args.features_dtype)
        num_tokens = self.training_args.pass_budget or DEFAULT_BATCH_TOKENS
        with self.training_args.main_process_first(desc="preparing the data"):
            evaluated = prepared_held_out(args, tokenizer, self.target.config, held_out)
            learned, report = prepared(args, tokenizer, self.target.config, trained)
        say(f"training data: {report}")
        for name, dataset in (("held_out", evaluated), ("features", learned)):
            if dataset is None:
                continue
            size = cache_size(dataset, self.target.config, dtype, self.layers)
            say(f"{name}: {size / 1e9:.2f} GB in {self.work / name}")
            write_feature_cache(
                dataset, self.target, tokenizer, self.work / name, dtype=dtype, made_from=contents,
                target_layer_ids=self.layers, tokens_per_batch=num_tokens,
            )  # fmt: skip

    def train(self) -> None:
        """Trains the drafter."""
        args, seed, folders = self.args, self.training_args.seed, list[str]()
        if args.features is not None:
            folders, contents = args.features, cached_contents(args.features, args.num_eval_rows)
            data = cached_data(folders, args.num_eval_rows, seed)
        elif args.cache_features == "true":
            self.release_target()  # its memory is the training's
            folders, contents = [str(self.work / "features")], self.cache_contents
            self._is_finished(Manifest(self.work / "features"), contents, "features")
            held_out = self.work / "held_out"
            data = cached_data(folders, 0, seed, held_out if (held_out / MADE_FROM).exists() else None)
        else:
            contents = self.rows_contents
            data = online_data(args, self.target_config, load_tokenizer(args), *self._split(), self.training_args)
        self._fit_to_target()

        def load() -> PreTrainedModel | CachedFeatures:
            return CachedFeatures(folders[0]) if folders else self.target

        contents = contents | drafter_contents(self.drafter_config)
        Training(args, self.fields, data, load, contents, self.folder).run(self.phases)
        self.release_target()

    def measure(self, stage: str) -> None:
        """Finds the fastest settings for this machine, or adds a comparison with plain decoding to the card."""
        args = self.args
        missing = "--target" if args.target is None else "--data" if args.features is not None else None
        num_prompts = 0 if missing else self._write_prompts()
        if stage == "tune" and num_prompts == 1:
            missing = "two prompts: one chooses the settings, the other times them"
        if missing or not num_prompts:
            say(f"{stage}: left out, because it needs {missing or 'prompts, and no held-out row has one that fits'}")
            return
        self.release_target()
        contents = {
            "drafter": checkpoint_fingerprint(self.folder),
            "num_measured_prompts": num_prompts,
            "prompts": file_fingerprint(self.prompt_file),
            "measured_new_tokens": args.measured_new_tokens,
            "generation_config": own_settings(generation_config(args)),
        }
        contents |= self.target_contents

        def measure() -> None:
            say(self.measures[stage](args, self.folder, self.prompt_file, num_prompts))

        self._once(stage, contents, measure)
        gc.collect()

    def _is_finished(self, manifest: Manifest, contents: dict[str, Any], stage: str) -> bool:
        """Returns whether a result is finished; raises `ValueError` where it was made from other contents."""
        manifest.check(contents, f"Give these values again, or begin anew with --restart {stage}.")
        PartialState().wait_for_everyone()
        return manifest.is_finished

    def _once(self, stage: str, contents: dict[str, Any], work: Callable[[], None]) -> None:
        """
        Does the work of a stage in the main process, unless it is finished. The others wait as long as it takes, which
        may be longer than a barrier waits.
        """
        manifest = Manifest(self.work / stage)
        if self._is_finished(manifest, contents, stage):
            say(f"{stage}: finished before")
            return
        if self.is_main:
            manifest.write(contents)
            work()
            manifest.write(contents, is_finished=True)
        while not Manifest(self.work / stage).is_finished:
            time.sleep(_PATIENCE)

    def _write_prompts(self) -> int:
        """Writes prompts of the rows that are held out into a file, and returns their number."""
        args, tokenizer = self.args, load_tokenizer(self.args)
        room = num_positions(self.target_config) - args.measured_new_tokens
        texts = (text for text in map(first_question, self._split()[1] or []) if text)
        fitting = (text for text in texts if len(encode_turn(tokenizer, [text], [])) <= room)
        prompts = list(islice(fitting, args.num_measured_prompts))
        if self.is_main:
            lines = [json.dumps({"prompt": text}) + "\n" for text in prompts]
            self.prompt_file.write_text("".join(lines), encoding="utf-8")
        PartialState().wait_for_everyone()
        return len(prompts)

    def _split(self) -> tuple[Any, Any]:
        """Returns the rows to train on and those to hold out, `None` where these are none."""
        # A line of the answers for each row of the data, so the split is theirs.
        rows = load_conversations(str(self.answers)) if self.args.regenerate else self.rows
        return split_rows(rows, self.args.num_eval_rows, self.training_args.seed)


def _bytes_of(path: Path) -> int:
    """Returns the size of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
