"""The defaults of `gumiho train` by device, from `defaults.yaml`, and files like it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from ...commands import UserValueError, as_user_errors
from ...files import read_text


DEFAULTS = Path(__file__).with_name("defaults.yaml")
_PARTS = ("everywhere", "accelerator", "cpu")
_RATES = "learning_rates"
_OFF = ("false", "no", "f", "n", "0")  # of a switch; any other word after it is another option, or wrong


def device_defaults(words: Sequence[str]) -> dict[str, Any]:
    """Returns the defaults of a command line: those of the device, with the values of the file that it names."""
    words_of = _options(words)
    found, given = _read(DEFAULTS, _device_of(words_of)) | _own_defaults(words_of), _given(words)
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        found.setdefault("bf16", "fp16" not in given)
    if given >= {"per_device_train_batch_size", "tokens_per_step"}:
        raise UserValueError("--per_device_train_batch_size counts rows, --tokens_per_step tokens. Give one of them.")
    if "per_device_train_batch_size" in given:
        found.pop("tokens_per_step", None)
    # A best checkpoint is one that was saved when it was evaluated.
    for name, other in (("save_steps", "eval_steps"), ("eval_steps", "save_steps")):
        if name in given and other not in given:
            found[other] = words_of.get(name, found[name])
    if "save_strategy" in given and "eval_strategy" not in given:
        strategy = words_of.get("save_strategy", found["save_strategy"])
        found["eval_strategy"] = "steps" if strategy == "best" else strategy
    if "eval_strategy" in given and "save_strategy" not in given:
        found["save_strategy"] = words_of.get("eval_strategy", found["eval_strategy"])
    strategies = [words_of.get(name, found[name]) for name in ("save_strategy", "eval_strategy")]
    if "no" in strategies or (strategies[0] not in ("best", strategies[1])):
        for name in {"load_best_model_at_end", "metric_for_best_model", "eval_on_start"} - given:
            found.pop(name)
    return found


def learning_rates(words: Sequence[str], width: int) -> dict[str, float]:
    """
    Returns the learning rates for a target of this width: of a `new` drafter, of `further` training, and of `heads`.
    Empty on a CPU, where steps are small and the recipe's rates hold, and where the user gives a rate.
    """
    if _device_of(_options(words)) == "cpu" or "learning_rate" in _given(words):
        return {}
    table = yaml.safe_load(read_text(DEFAULTS))[_RATES]
    return next(row for row in table if width <= row["width"])


def given_options(words: Sequence[str]) -> set[str]:
    """Returns the options that a command line names, a switch that is turned off by its name, too."""
    return {name.removeprefix("no_") for name in _options(words)}


def _device_of(words_of: dict[str, str]) -> str:
    uses_cpu = words_of.get("use_cpu", "false").lower() not in _OFF
    return "accelerator" if torch.accelerator.is_available() and not uses_cpu else "cpu"


def _own_defaults(words_of: dict[str, str]) -> dict[str, Any]:
    """Returns the values of the file that a command line names, if any."""
    return _read(Path(words_of["config"]), _device_of(words_of)) if "config" in words_of else {}


def _given(words: Sequence[str]) -> set[str]:
    """Returns the options that a command line or its file gives."""
    words_of = _options(words)
    return {*words_of, *_own_defaults(words_of)}


def _read(path: Path, device: str) -> dict[str, Any]:
    """Returns the options that a file gives for this kind of device; raises `ValueError` for other parts."""
    with as_user_errors():
        text = read_text(path)
    try:
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UserValueError(f"{str(path)!r} is no YAML: {error}") from error
    if isinstance(found, dict) and path == DEFAULTS:
        found.pop(_RATES)
    unknown = sorted(map(str, set(found) - set(_PARTS))) if isinstance(found, dict) else []
    if unknown or not isinstance(found, dict) or not all(isinstance(part, dict | None) for part in found.values()):
        wrong = f"the part {unknown[0]!r}" if unknown else "no parts with options"
        raise UserValueError(
            f"{str(path)!r} has {wrong}. Its parts are {', '.join(_PARTS)}, each with options below it."
        )
    return (found.get("everywhere") or {}) | (found.get(device) or {})


def _options(words: Sequence[str]) -> dict[str, str]:
    """Returns the options in a command line, each with the word after it."""
    found = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("-", "_")] = value if equals else following
    return found
