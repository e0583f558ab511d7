"""The defaults of `gumiho train` by device, from `defaults.yaml`, and files like it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from ..text_files import read_text
from ..user_errors import UserValueError, as_user_errors


DEFAULTS = Path(__file__).with_name("defaults.yaml")
_PARTS = ("everywhere", "accelerator", "cpu")


def read_defaults(path: Path, on_accelerator: bool) -> dict[str, Any]:
    """Returns the options that a file gives for this kind of device; raises `ValueError` for other parts."""
    with as_user_errors():
        text = read_text(path)
    try:
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UserValueError(f"{str(path)!r} is no YAML: {error}") from error
    if not isinstance(found, dict) or (unknown := set(found) - set(_PARTS)):
        wrong = "no parts" if not isinstance(found, dict) else f"the part {min(unknown)!r}"
        raise UserValueError(
            f"{str(path)!r} has {wrong}. Its parts are {', '.join(_PARTS)}, each with options below it."
        )
    return (found.get("everywhere") or {}) | (found.get("accelerator" if on_accelerator else "cpu") or {})


def trains_on_accelerator(words: Sequence[str]) -> bool:
    """Whether a command line trains on an accelerator."""
    return torch.accelerator.is_available() and "--use_cpu" not in words


def given_options(words: Sequence[str]) -> set[str]:
    """Returns the names of the options in a command line."""
    return {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}


def device_defaults(words: Sequence[str]) -> dict[str, Any]:
    """Returns the defaults of a command line: those of the device, with the values of the file that it names."""
    on_accelerator, given = trains_on_accelerator(words), given_options(words)
    found = read_defaults(DEFAULTS, on_accelerator)
    if (config := value_of(words, "config")) is not None:
        own = read_defaults(Path(config), on_accelerator)
        found, given = found | own, given | set(own)
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        found.setdefault("bf16", "--fp16" not in words)
    if "per_device_train_batch_size" in given:
        found.pop("tokens_per_step", None)
    # A best checkpoint is one that was saved when it was evaluated.
    for name, other in (("save", "eval"), ("eval", "save")):
        if f"{name}_steps" in given and f"{other}_steps" not in given:
            steps = value_of(words, f"{name}_steps")
            found[f"{other}_steps"] = found[f"{name}_steps"] if steps is None else float(steps)
    if given & {"save_strategy", "eval_strategy"}:
        for name in ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"):
            found.pop(name)
        if "eval_strategy" not in given:
            found["eval_strategy"] = "no"
    return found


def value_of(words: Sequence[str], name: str) -> str | None:
    """Returns the value of an option in a command line; `None` where it is not given."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option.removeprefix("--").replace("-", "_") == name:
            return value if equals else following
    return None
