"""The options that name a target and a drafter, the same in all commands."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...commands import UserValueError, option
from .known import find_pair


Options = TypeVar("Options", bound="TargetArguments")
PairOptions = TypeVar("PairOptions", bound="PairArguments")


@dataclass(kw_only=True)
class TargetArguments:
    """The options that name a target: `pair` or `target`."""

    pair: str | None = option("Short name of a target and its drafter: demo or smollm2.")
    target: str | None = option("Target model: a folder or a name on the Hub.")
    dtype: str = option("Precision of all models, e.g. `bfloat16`.", "auto")
    device_map: str | None = option("`device_map` for the target, e.g. `auto` (default: one device).")
    chat_template: Path | None = option("File with a chat template for the target's tokenizer.")
    chat_template_kwargs: str | None = option("""Template arguments as JSON, e.g. '{"enable_thinking": false}'.""")

    def resolved(self: Options) -> Options:
        """
        Returns the options with folders or names on the Hub in place of `pair`. On a CPU, a pair that you name without
        a `dtype` runs in the pair's own precision. Progress is written to standard error.

        Raises:
            ImportError: A library that the pair needs is not installed.
            OSError: A model is missing and cannot be downloaded.
            ValueError: The options do not name the models, or name an unknown pair.
        """
        target, dtype = self.target, self.dtype
        if self.pair is not None:
            known = find_pair(self.pair)
            target = target or known.find_target()
            if dtype == "auto" and not torch.accelerator.is_available():
                dtype = known.cpu_dtype
        if target is None:
            raise UserValueError("Specify --pair NAME, or --target.")
        return replace(self, pair=None, target=target, dtype=dtype)


@dataclass(kw_only=True)
class PairArguments(TargetArguments):
    """The options that name a target and a drafter: `pair`, or both of `target` and `assistant`."""

    assistant: str | None = option("Gumiho drafter: a folder or a name on the Hub.")

    def resolved(self: PairOptions) -> PairOptions:
        """Does the same as in [`TargetArguments`]. The drafter is found first."""
        assistant = self.assistant
        if self.pair is not None:
            assistant = assistant or find_pair(self.pair).find_drafter()
        if assistant is None or (self.pair is None and self.target is None):
            raise UserValueError("Specify --pair NAME, or both --target and --assistant.")
        return replace(super().resolved(), assistant=assistant)


_BY_DEFAULT = "(default: the drafter's setting)."


@dataclass(kw_only=True)
class DraftingArguments(PairArguments):
    """The options of a pair, and settings of its drafter."""

    num_assistant_tokens: int | None = option(f"Draft tokens verified per cycle {_BY_DEFAULT}")
    branching_factor: int | None = option(f"Tokens kept at each serial step; 1 drafts a chain {_BY_DEFAULT}")
    draft_temperature: float | None = option(f"Temperature of the draft probabilities {_BY_DEFAULT}")
    prompt_lookup_num_tokens: int | None = option(
        f"Maximum number of tokens to draft by prompt lookup; 0 for none {_BY_DEFAULT}"
    )


def prompts_field(default: Any = None, without: str = "") -> Any:
    """Returns the field of the option `prompts`, for `read_prompts`. `without` says what happens without it."""
    return option(
        "Prompts: a JSONL, JSON or Parquet file with `turns`, `prompt` or `text`, or a dataset (a folder, or a name "
        f"on the Hub such as `nvidia/SPEED-Bench:qualitative`).{without}",
        default,
    )
