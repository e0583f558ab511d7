"""The one reading of a command line: class, recipe, device, `--config` and what is given become one value."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from ...commands import UserValueError, as_user_errors, build, read_words
from ...files import read_text
from ...model.target_shape import state_width
from ..arguments import GumihoTrainingArguments
from .arguments import RecipeArguments


DEFAULTS = Path(__file__).with_name("defaults.yaml")
RESOLVED = "resolved.yaml"
_PARTS = ("everywhere", "accelerator", "cpu", "phases")
_KINDS = (RecipeArguments, GumihoTrainingArguments)
# What holds for one start alone, and secrets.
_NOT_KEPT = {"config", "restart", "yes", "force", "plan", "ignore_plan", "hub_token"}


@dataclass
class Options:
    """What a run is asked to do."""

    run: RecipeArguments
    training: GumihoTrainingArguments  # as far as all phases share them
    phases: dict[str, GumihoTrainingArguments]  # by name
    given: set[str]  # the names of what the command line or its file gives
    values: dict[str, Any]  # of all phases
    of_phases: dict[str, dict[str, Any]]  # of one phase alone

    def fit_to_target(self, config: Any) -> None:
        """Gives phases what a target of this config decides: the learning rate, and a new drafter's tokens."""
        config = config.get_text_config(decoder=True)
        is_new, width = self.run.drafter is None, state_width(config)
        share = recipe_of(self.run)["vocabulary_share"] if is_new else 1
        rates = next(row for row in _of_package()["learning_rates"] if width <= row["width"])
        for name, phase in self.phases.items():
            found: dict[str, Any] = {}
            if "learning_rate" not in self.given and device_of(self.training.use_cpu) == "accelerator":
                # Steps are small on a CPU, where the recipe's rates hold.
                has_heads_alone = phase.train_only in ("parallel", "transition")
                found["learning_rate"] = rates["heads" if has_heads_alone else "new" if is_new else "further"]
            if share < 1 and phase.draft_vocabulary_size is None:
                found["draft_vocabulary_size"] = int(config.vocab_size * share)
            for option, value in found.items():
                setattr(phase, option, value)
            self.of_phases[name] |= found

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Returns all values that differ from those of the classes, as a file has them that `--config` takes."""
        decided = ("packing", "max_length", "cache_features", "writing_batch_size")
        values = self.values | {name: getattr(self.run, name) for name in decided}
        values |= {"tokens_per_pass": next(iter(self.phases.values())).tokens_per_pass}
        kept = {name: value for name, value in sorted(values.items()) if name not in _NOT_KEPT}
        as_yaml = {name: str(value) if isinstance(value, Path) else value for name, value in kept.items()}
        return {"everywhere": as_yaml, "phases": self.of_phases}


def read_options(words: Sequence[str], summary: str) -> Options:
    """
    Returns the options of `gumiho train`. A value of the command line goes before one of `--config`, this one before
    those of the device, of the recipe, and of the classes.

    Raises:
        ValueError: Options contradict each other, or a file is no YAML of options.
    """
    package = _of_package()
    usage = "--target NAME --data FILE|DATASET|none --output_dir DIR"
    shown = package["everywhere"] | package[device_of()]
    of_line = read_words(_KINDS, "train", words, summary, usage=usage, defaults=shown, groups=package["help"])
    path = of_line.get("config")
    of_file, phases_of_file = ({}, {}) if path is None else _read(path, of_line.get("use_cpu"))
    if phases_of_file and "recipe" in of_line:
        raise UserValueError("--recipe and the phases of --config are two recipes. Leave one of them out.")
    given = of_file | of_line
    values = _in_agreement(package["everywhere"] | package[device_of(given.get("use_cpu"))], given)
    run, training = build(_KINDS, values)
    if run.packing is None:
        run.packing = recipe_of(run)["packing"]
    by_rows = training.tokens_per_step is None and not run.packing
    order = {"train_sampling_strategy": "group_by_length"} if by_rows else {}
    # What a file says of a phase goes before what it says of all of them, and a recipe's before nothing but classes.
    before = {*of_line} if phases_of_file else {*values}
    of_phases = {
        name: {option: value for option, value in (order | phase).items() if option not in before}
        for name, phase in (phases_of_file or _phases_of(run, training)).items()
    }
    phases = {}
    for name, phase in of_phases.items():
        # The finished drafter alone is pushed.
        place = {"output_dir": str(Path(training.output_dir) / "work" / name), "push_to_hub": False}
        (phases[name],) = build([GumihoTrainingArguments], values | phase | place)
    named = {*given}.union(*phases_of_file.values())
    return Options(run, training, phases, named, values, of_phases)


def _phases_of(run: RecipeArguments, training: GumihoTrainingArguments) -> dict[str, dict[str, Any]]:
    """
    Returns the options of each phase. A command line that names a drafter or a part of it asks for a single training;
    otherwise the phases are the recipe's.
    """
    recipe, part = recipe_of(run), training.train_only
    if run.drafter is None and part is None:
        return dict(recipe["phases"])
    if run.num_parallel_heads is None:
        return {"train": recipe["further"] if part is None else {}}
    # New heads learn as in the recipe's phase for them.
    of_heads = (found for found in recipe["phases"].values() if found.get("train_only") == part == "parallel")
    return {"train": next(of_heads, {})}


def recipe_of(args: RecipeArguments) -> dict[str, Any]:
    """Returns the recipe that options name, as `defaults.yaml` describes it."""
    return dict(_of_package()["recipes"][args.recipe])


def device_of(use_cpu: bool | None = None) -> str:
    """Returns the part of a file that holds for this machine."""
    return "accelerator" if torch.accelerator.is_available() and not use_cpu else "cpu"


@cache
def _of_package() -> Any:
    return yaml.safe_load(read_text(DEFAULTS))


def _read(path: Path, use_cpu: bool | None) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the options of a file for this device, and those of its phases; raises `ValueError` for other parts."""
    with as_user_errors():
        text = read_text(path)
    try:
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UserValueError(f"{str(path)!r} is no YAML: {error}") from error
    parts = found if isinstance(found, dict) else {str(found): None}
    for name, part in parts.items():
        if name not in _PARTS or not isinstance(part, dict | None):
            raise UserValueError(
                f"{str(path)!r} has {name!r}. Its parts are {', '.join(_PARTS)}, each with options below it."
            )
    everywhere = _as_given(parts.get("everywhere"))
    use_cpu = everywhere.get("use_cpu") if use_cpu is None else use_cpu
    of_phases = {str(name): _as_given(options) for name, options in (parts.get("phases") or {}).items()}
    return everywhere | _as_given(parts.get(device_of(use_cpu))), of_phases


def _as_given(part: dict[str, Any] | None) -> dict[str, Any]:
    """Returns values of a YAML file as a command line would give them; an unknown one ends the program."""
    values = part or {}
    lists = {item.name for kind in _KINDS for item in fields(kind) if str(item.type).startswith("list")}
    words: list[str] = []
    for name, value in values.items():
        if name in lists and value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        elif value is not None:
            words.append(f"--{name}={json.dumps(value) if isinstance(value, dict | bool) else value}")
    nothing = dict.fromkeys(name for name, value in values.items() if value is None)
    return nothing | read_words(_KINDS, "train", words, "")


def _in_agreement(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Returns the values given, and those defaults that agree with them."""
    found = defaults | given
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        found.setdefault("bf16", "fp16" not in given)
    counts = ("per_device_train_batch_size", "tokens_per_step")
    if all(given.get(name) is not None for name in counts):
        raise UserValueError("--per_device_train_batch_size counts rows, --tokens_per_step tokens. Give one of them.")
    if "per_device_train_batch_size" in given and "tokens_per_step" not in given:
        found["tokens_per_step"] = None
    # A best checkpoint is one that was saved when it was evaluated.
    for name, other in (("save_steps", "eval_steps"), ("eval_steps", "save_steps")):
        if name in given and other not in given:
            found[other] = given[name]
    if "save_strategy" in given and "eval_strategy" not in given:
        found["eval_strategy"] = "steps" if found["save_strategy"] == "best" else found["save_strategy"]
    if "eval_strategy" in given and "save_strategy" not in given:
        found["save_strategy"] = found["eval_strategy"]
    strategies = found["save_strategy"], found["eval_strategy"]
    if "no" in strategies or strategies[0] not in ("best", strategies[1]):
        for name in {"load_best_model_at_end", "metric_for_best_model", "eval_on_start"} - {*given}:
            del found[name]
    return found
