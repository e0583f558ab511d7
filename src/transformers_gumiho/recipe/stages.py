"""The stages of `gumiho train`, and which of them are finished."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from ..benchmarking import BenchmarkSettings, decoding_modes, read_prompts, run_benchmark, summarize
from ..benchmarking.journal import Journal, measuring_conditions
from ..benchmarking.modes import PROMPT_LOOKUP, choose_modes
from ..benchmarking.report import markdown
from ..model.configuration_gumiho import GumihoConfig
from ..pairs import PairArguments, load_pair
from ..training import GumihoTrainingArguments, cache_size, load_conversations, write_feature_cache
from ..training.data.usable_rows import split_rows
from ..tuning import TuningArguments, describe, tune
from .arguments import STAGES, RecipeArguments
from .plan import describe as describe_plan
from .plan import estimate, measure_speed
from .recipes import RECIPES
from .training import cached_data, online_data, prepared, prompt_of, train_phases, unsplit_models
from .writing import load_rows, load_target, load_tokenizer, write_answers


_EVALUATION = "\n## Decoding speed\n"


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

    @property
    def target(self) -> PreTrainedModel:
        """The target, loaded when it is first needed."""
        if self._target is None:
            with unsplit_models(self.training_args):
                self._target = load_target(self.args)
        return self._target

    def plan(self) -> None:
        """Prints what the run will take. Raises `OSError` where the disk has no room for it."""
        args = self.args
        if args.features is not None:
            return
        num_rows = args.num_prompts
        if not args.writes_prompts:
            rows = load_rows(args, load_tokenizer(args), self.target.config, answered=not args.regenerate)[0]
            num_rows = len(rows)
        config = GumihoConfig.from_target(self.target.config, **self.fields)
        speed = measure_speed(self.target, args.writing_batch_size)
        epochs = [phase.num_train_epochs for phase in self.phases.values()]
        costs = estimate(args, self.target, config, num_rows, epochs, speed)
        self._say(f"{describe_plan(costs, self.folder)}\n{num_rows:,} rows of data")

    def run(self) -> None:
        """Runs the stages that are not finished."""
        chosen = [stage for stage in STAGES if stage in self.args.stages]
        finished = Finished(self.work / "finished.json")
        steps: dict[str, Callable[[], None]] = {
            "write": self.write, "features": self.write_features, "train": self.train, "tune": self.tune,
            "evaluate": self.evaluate,
        }  # fmt: skip
        for number, stage in enumerate(chosen, 1):
            if finished.has(stage, self._settings_of(stage)):
                self._say(f"[{number}/{len(chosen)}] {stage}: finished before")
                continue
            self._say(f"[{number}/{len(chosen)}] {stage}")
            steps[stage]()
            PartialState().wait_for_everyone()
            if self.is_main:
                finished.add(stage, self._settings_of(stage))

    def write(self) -> None:
        """Lets the target answer."""
        args = self.args
        if args.features is None and args.regenerate:
            target = None if args.endpoint is not None else self.target
            write_answers(args, load_tokenizer(args), self.answers, self.training_args.seed, target)

    def write_features(self) -> None:
        """Runs the target once over the answers, and keeps its states."""
        args = self.args
        if args.features is not None or not args.cache_features:
            return
        tokenizer, dtype = load_tokenizer(args), getattr(torch, args.features_dtype)
        for name, rows in zip(("features", "held_out"), self._split(), strict=True):
            if rows is None:
                continue
            with self.training_args.main_process_first(desc="preparing the data"):
                dataset, report = prepared(args, tokenizer, self.target, rows)
            size = cache_size(dataset, self.target.config, dtype, args.target_layer_ids)
            self._say(f"{name}: {report}\n{name}: {size / 1e9:.2f} GB in {self.work / name}")
            layers = args.target_layer_ids
            write_feature_cache(
                dataset, self.target, tokenizer, self.work / name, dtype=dtype, target_layer_ids=layers
            )

    def train(self) -> None:
        """Trains the drafter."""
        args, held_out = self.args, self.work / "held_out"
        # Of an earlier drafter.
        shutil.rmtree(self.work / "evaluation", ignore_errors=True)
        if args.features is not None:
            data = cached_data(args.features, args.num_eval_rows, seed=self.training_args.seed)
        elif args.cache_features:
            self._target = None  # its memory is the training's
            has_held_out = (held_out / "cache.json").exists()
            data = cached_data([str(self.work / "features")], 0, held_out if has_held_out else None)
        else:
            data = online_data(args, self.target, load_tokenizer(args), *self._split(), self.training_args)
        self._limit_vocabulary(data["target"].config)
        train_phases(args, self.phases, self.fields, data, self.folder)
        self._target = None

    def tune(self) -> None:
        """Finds the fastest decoding settings for this machine."""
        if self._can_measure("tune"):
            prompts, args = self._prompts(), self.args
            options = TuningArguments(
                target=str(args.target), assistant=str(self.folder), prompts=str(self._prompt_file), batch_sizes=[1],
                dtype=args.target_dtype, device_map=args.device_map, num_prompts=len(prompts),
                max_new_tokens=args.measured_new_tokens,
            )  # fmt: skip
            self._say(describe(tune(options)))

    def evaluate(self) -> None:
        """Compares the drafter with plain decoding and prompt lookup, and adds the table to its card."""
        if not self._can_measure("evaluate"):
            return
        args, self._target = self.args, None
        self._prompts()
        pair = PairArguments(
            target=args.target, assistant=str(self.folder), dtype=args.target_dtype, device_map=args.device_map
        )
        target, _, drafter = load_pair(pair)
        modes = choose_modes(decoding_modes(drafter), [PROMPT_LOOKUP, "gumiho"])
        conditions = measuring_conditions(target, drafter) | {"max_new_tokens": args.measured_new_tokens}
        (self.work / "evaluation").mkdir(exist_ok=True)
        settings = BenchmarkSettings(max_new_tokens=args.measured_new_tokens)
        questions, tokenizer = read_prompts(str(self._prompt_file)), AutoTokenizer.from_pretrained(self.folder)
        journal = Journal(self.work / "evaluation" / "samples.jsonl", conditions)
        samples = run_benchmark(target, tokenizer, questions, modes, settings, journal)
        if len({sample.mode for sample in samples}) < len(modes):
            raise KeyboardInterrupt("Stopped. Run the same command again to continue from here.")
        table = markdown(summarize(samples))
        self._say(table)
        card = self.folder / "README.md"
        text = card.read_text(encoding="utf-8").split(_EVALUATION)[0] if card.exists() else ""
        card.write_text(
            f"{text}{_EVALUATION}\nHeld-out prompts, on the machine that trained the drafter:\n\n{table}",
            encoding="utf-8",
        )

    @property
    def _prompt_file(self) -> Path:
        return self.work / "prompts.jsonl"

    def _can_measure(self, stage: str) -> bool:
        args = self.args
        missing = "--target" if args.target is None else "--data" if args.features is not None else None
        if args.lora_rank or PartialState().num_processes > 1:
            missing = "a single process and a drafter that is no adapter"
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
        self._prompt_file.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
        return prompts

    def _split(self) -> tuple[Any, Any]:
        """Returns the rows to train on and those to hold out, `None` where these are none."""
        args = self.args
        if args.regenerate:
            rows = load_conversations(str(self.answers))  # a line for each row of the data, so the split is theirs
        else:
            config = AutoConfig.from_pretrained(args.target)
            rows, report = load_rows(args, load_tokenizer(args), config, answered=True)
            self._say(report)
        return split_rows(rows, args.num_eval_rows, self.training_args.seed)

    def _limit_vocabulary(self, target_config: Any) -> None:
        share = RECIPES[self.args.recipe].vocabulary_share
        if share == 1 or self.args.drafter is not None:
            return
        for phase in self.phases.values():
            if phase.draft_vocabulary_size is None:
                phase.draft_vocabulary_size = int(target_config.get_text_config(decoder=True).vocab_size * share)

    def _settings_of(self, stage: str) -> dict[str, Any]:
        """Returns what the result of a stage depends on."""
        args = {name: str(value) for name, value in vars(self.args).items() if name not in ("stages", "plan")}
        if stage in ("write", "features"):
            return args | {"seed": self.training_args.seed}
        left_out = {"output_dir", "logging_dir", "draft_vocabulary_size"}
        phases = {
            name: {key: str(value) for key, value in phase.to_dict().items() if key not in left_out}
            for name, phase in self.phases.items()
        }
        return args | {"phases": phases}

    def _say(self, text: str) -> None:
        if self.is_main:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()


class Finished:
    """The stages that are finished, in a file, with the settings they were run with."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._stages: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            self._stages = {}  # without it, stages look at what they find

    def has(self, stage: str, settings: dict[str, Any]) -> bool:
        """Whether a stage was finished with these settings."""
        return self._stages.get(stage) == settings

    def add(self, stage: str, settings: dict[str, Any]) -> None:
        """Notes that a stage is finished; later ones have to be run again."""
        kept = STAGES[: STAGES.index(stage)]
        self._stages = {name: self._stages[name] for name in kept if name in self._stages} | {stage: settings}
        unfinished = self.path.with_name(self.path.name + ".unfinished")
        unfinished.write_text(json.dumps(self._stages, indent=2), encoding="utf-8")
        unfinished.replace(self.path)
