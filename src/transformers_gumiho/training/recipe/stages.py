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
import yaml  # type: ignore[import-untyped]
from accelerate import PartialState
from transformers import PreTrainedModel

from ...commands import UserFileNotFoundError, UserValueError, as_user_errors
from .. import CachedFeatures, cache_size, load_conversations, write_feature_cache
from ..data.conversations import first_question
from ..data.fingerprint import checkpoint_fingerprint, file_fingerprint
from ..data.manifest import MADE_FROM, Manifest
from ..data.open_text import encode_turn
from ..data.preparation import split_rows
from ..data.run_files import ask_before_deleting
from ..feature_cache import is_complete, layer_fields
from ..feature_extraction import DEFAULT_BATCH_TOKENS
from ..writing.local import own_settings
from .arguments import STAGES, RecipeArguments
from .contents import cached_contents, rows_contents, target_contents, writing_contents
from .context import RunContext
from .options import RESOLVED, Options
from .phases import Training, cached_data, is_there, online_data
from .target import generation_config, load_tokenizer, num_positions, say, write_answers
from .trials import try_stages


_PATIENCE = 1.0  # seconds between two looks at what the main process does


# Takes the options, the drafter's folder, a file of prompts, and their number.
Measures = Mapping[str, Callable[[RecipeArguments, Path, Path, int], str]]


class Run(RunContext):
    """
    One run of `gumiho train`. Everything but the drafter itself lies in `work/` within its folder. `measures` does the
    stages `tune` and `evaluate`, by their names, and returns what it found in words.
    """

    def __init__(self, options: Options, folder: Path, measures: Measures):
        super().__init__(options, folder)
        self.measures = measures
        self.answers, self.prompt_file = self.work / "answers.jsonl", self.work / "prompts.jsonl"

    @property
    def has_begun(self) -> bool:
        """Whether an earlier start of this run chose the source of states."""
        return (self.work / MADE_FROM).exists()

    @cached_property
    def target_contents(self) -> dict[str, Any]:
        """Fingerprints of the target and its tokenizer."""
        with as_user_errors():
            return target_contents(self.args, load_tokenizer(self.args))

    @cached_property
    def rows_contents(self) -> dict[str, Any]:
        """What the training's rows are made from."""
        return self.target_contents | rows_contents(self, self.answers)

    @property
    def cache_contents(self) -> dict[str, Any]:
        """What a cache of the states is made from."""
        return self.rows_contents | {"dtype": self.args.features_dtype, **layer_fields(self.layers)}

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
            sizes = {path.relative_to(self.folder): _size_of(path) / 1e6 for path in found}
            listed = ", ".join(f"{path} ({size:,.1f} MB)" for path, size in sizes.items())
            ask_before_deleting(f"--restart {stage} deletes {listed}", self.training_args.world_size == 1)
        for path in found if self.is_main else ():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        PartialState().wait_for_everyone()

    def run(self) -> None:
        """Runs the stages that are not finished."""
        chosen = [stage for stage in STAGES if stage in self.args.stages]
        reads_answers = self.args.features is None and self.args.regenerate
        if reads_answers and "write" not in chosen and not self.answers.exists():
            raise UserFileNotFoundError(f"{str(self.work)!r} holds no answers yet. Add write to --stages.")
        if {"features", "train"} & set(chosen):
            self._choose_source()
        pending = [stage for stage in chosen if not self._has_ended(stage)]
        is_long = not {"write", "features", "train"}.isdisjoint(pending)
        if is_long and self.has_accelerator and not self.args.ignore_plan:
            try_stages(self, pending)
        self._keep_options()
        steps = {"write": self.write, "features": self.write_features, "train": self.train}
        for number, stage in enumerate(chosen, 1):
            say(f"[{number}/{len(chosen)}] {stage}")
            steps.get(stage, partial(self.measure, stage))()
            PartialState().wait_for_everyone()

    def _has_ended(self, stage: str) -> bool:
        if stage == "train":
            return all(map(is_there, self.phases.values()))
        place = (self.work, self.answers.name) if stage == "write" else (self.work / stage,)
        return Manifest(*place).is_finished

    def _keep_options(self) -> None:
        path, text = self.work / RESOLVED, yaml.safe_dump(self.options.resolved(), sort_keys=False)
        say(f"options, which {path} keeps:\n{text}")
        if self.is_main:
            path.write_text(text, encoding="utf-8")

    def _choose_source(self) -> None:
        """Takes the source of states that the run began with, or records it."""
        manifest, args = Manifest(self.work), self.args
        if args.cache_features == "auto":
            args.cache_features = manifest.made_from.get("cache_features", "true")
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
        args = self.args
        if args.features is not None or not args.regenerate:
            return
        tokenizer = load_tokenizer(args)
        contents = {} if args.endpoint is not None else self.target_contents
        contents = contents | writing_contents(self, tokenizer)
        if self._is_finished(Manifest(self.work, self.answers.name), contents, "write") and self.answers.exists():
            say("write: finished before")
            return
        target = self.target if args.endpoint is None else None
        budget = self.training_args.pass_budget
        write_answers(args, tokenizer, self.answers, self.seed, self.rows, target, budget, contents)

    def write_features(self) -> None:
        """Runs the target once over the answers, and keeps its states."""
        if self.args.features is not None or self.args.cache_features == "false":
            return
        contents = self.cache_contents
        folders = {name: self.work / name for name in ("held_out", "features")}
        is_finished = self._is_finished(Manifest(folders["features"]), contents, "features")
        written = [folder for folder in folders.values() if folder.exists()]
        if is_finished and all(map(is_complete, written)):
            say("features: finished before")
            return
        data, dtype = online_data(self, *self._split()), getattr(torch, self.args.features_dtype)
        for name, dataset in (("held_out", data["eval_dataset"]), ("features", data["train_dataset"])):
            if dataset is None:
                continue
            size = cache_size(dataset, self.target.config, dtype, self.layers)
            say(f"{name}: {size / 1e9:.2f} GB in {folders[name]}")
            write_feature_cache(
                dataset, self.target, data["processing_class"], folders[name], dtype=dtype, made_from=contents,
                target_layer_ids=self.layers, tokens_per_batch=self.training_args.pass_budget or DEFAULT_BATCH_TOKENS,
            )  # fmt: skip

    def train(self) -> None:
        """Trains the drafter."""
        args, folders = self.args, list[str]()
        if args.features is not None:
            folders, contents = args.features, cached_contents(args.features, args.num_eval_rows)
            data = cached_data(folders, args.num_eval_rows, self.seed)
        elif args.cache_features == "true":
            self.release_target()  # its memory is the training's
            folders, contents = [str(self.work / "features")], self.cache_contents
            self._is_finished(Manifest(self.work / "features"), contents, "features")
            held_out = self.work / "held_out"
            data = cached_data(folders, 0, self.seed, held_out if (held_out / MADE_FROM).exists() else None)
        else:
            contents, data = self.rows_contents, online_data(self, *self._split())

        def load() -> PreTrainedModel | CachedFeatures:
            return CachedFeatures(folders[0]) if folders else self.target

        Training(self, data, load, contents).train()
        self.release_target()

    def measure(self, stage: str) -> None:
        """Finds the fastest settings for this machine, or adds a comparison with plain decoding to the card."""
        args = self.args
        num_prompts = 0 if args.target is None or args.features is not None else self._write_prompts()
        if num_prompts < (2 if stage == "tune" else 1):
            say(
                f"{stage}: left out, because it needs --target, --data, and held-out prompts that fit: one, or two to "
                f"tune, one of which chooses the settings and the other times them"
            )
            return
        self.release_target()
        contents = self.target_contents | {
            "drafter": checkpoint_fingerprint(self.folder),
            "num_measured_prompts": num_prompts,
            "prompts": file_fingerprint(self.prompt_file),
            "measured_new_tokens": args.measured_new_tokens,
            "generation_config": own_settings(generation_config(args)),
        }
        if self._is_finished(Manifest(self.work / stage), contents, stage):
            say(f"{stage}: finished before")
            return
        if self.is_main:
            manifest = Manifest(self.work / stage)
            manifest.write(contents)
            say(self.measures[stage](args, self.folder, self.prompt_file, num_prompts))
            manifest.write(contents, is_finished=True)
        # The others wait as long as it takes, which may be longer than a barrier waits.
        while not Manifest(self.work / stage).is_finished:
            time.sleep(_PATIENCE)
        gc.collect()

    def _is_finished(self, manifest: Manifest, contents: dict[str, Any], stage: str) -> bool:
        """Returns whether a result is finished; raises `ValueError` where it was made from other contents."""
        manifest.check(contents, f"Give these values again, or begin anew with --restart {stage}.")
        PartialState().wait_for_everyone()
        return manifest.is_finished

    def _write_prompts(self) -> int:
        """Writes prompts of the rows that are held out into a file, and returns their number."""
        args, tokenizer = self.args, load_tokenizer(self.args)
        room = num_positions(self.target_config) - args.measured_new_tokens
        rows = self._split()[1] or ()
        texts = map(first_question, rows) if args.regenerate or not rows else rows["question"]
        fitting = (text for text in texts if text and len(encode_turn(tokenizer, [text], [])) <= room)
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
        return split_rows(rows, self.args.num_eval_rows, self.seed)


def _size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
