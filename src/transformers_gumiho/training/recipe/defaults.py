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
_OFF = ("false", "no", "f", "n", "0")  # of a switch; any other word after it is another option, or wrong


def device_defaults(words: Sequence[str]) -> dict[str, Any]:
    """Returns the defaults of a command line: those of the device, with the values of the file that it names."""
    words_of = _options(words)
    uses_cpu = words_of.get("use_cpu", "false").lower() not in _OFF
    device = "accelerator" if torch.accelerator.is_available() and not uses_cpu else "cpu"
    found, own = _read(DEFAULTS, device), {}
    if "config" in words_of:
        own = _read(Path(words_of["config"]), device)
    found, given = found | own, {*words_of, *own}
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        found.setdefault("bf16", "fp16" not in given)
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


def given_options(words: Sequence[str]) -> set[str]:
    """Returns the options that a command line names, a switch that is turned off by its name, too."""
    return {name.removeprefix("no_") for name in _options(words)}


def _read(path: Path, device: str) -> dict[str, Any]:
    """Returns the options that a file gives for this kind of device; raises `ValueError` for other parts."""
    with as_user_errors():
        text = read_text(path)
    try:
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UserValueError(f"{str(path)!r} is no YAML: {error}") from error
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
