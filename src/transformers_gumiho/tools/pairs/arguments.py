"""The options that name a target and a drafter, the same in all commands, and pairs with a short name."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...commands import UserFileNotFoundError, UserValueError, check_limits, option
from . import smollm2


Options = TypeVar("Options", bound="PairArguments")
_REPOSITORY = "https://github.com/transformers-gumiho/transformers-gumiho"


# The pairs with a short name, and the folder of the repository's `examples` that holds their drafters.
_FOLDERS = {"demo": "demo_pair", "smollm2": "smollm2"}


def find_target(pair: str) -> str:
    """Returns the folder of a pair's target, which is made if necessary, or its name on the Hub."""
    return smollm2.find_target() if pair == "smollm2" else _find(f"{_FOLDERS[pair]}/target")


def find_drafter(pair: str) -> str:
    """Returns the folder of a pair's drafter. Raises `FileNotFoundError` where there is no clone of the repository."""
    return _find(f"{_FOLDERS[pair]}/gumiho")


def cpu_dtype(pair: str) -> str:
    """Returns the precision in which a CPU runs a pair. Other devices use the precision of its files."""
    # Older releases of PyTorch do not report what a CPU computes in.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    in_bfloat16 = any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    # Of the toy, reading the weights takes too little time for 16 bits to pay.
    return "bfloat16" if pair == "smollm2" and in_bfloat16 else "float32"


def _find(name: str) -> str:
    for folder in (Path(__file__).parents[4] / "examples" / name, Path("examples", name)):
        if (folder / "config.json").exists():
            return str(folder)
    raise UserFileNotFoundError(
        f"There is no folder examples/{name} here, which this pair needs. Run this in a clone of {_REPOSITORY}, or "
        f"specify --target and --assistant."
    )


@dataclass(kw_only=True)
class PairArguments:
    """The options that name a target and a drafter: `pair`, or both of `target` and `assistant`."""

    pair: str | None = option("Short name of a target and its drafter: demo or smollm2.")
    target: str | None = option("Target model: a folder or a name on the Hub.")
    assistant: str | None = option(
        "Gumiho drafter: a folder or a name on the Hub; `mtp` for the MTP layers of the target."
    )
    dtype: str = option("Precision of all models, e.g. `bfloat16`.", "auto")
    device_map: str | None = option("`device_map` for the target, e.g. `auto` (default: one device).")
    chat_template: Path | None = option("File with a chat template for the target's tokenizer.")
    chat_template_kwargs: str | None = option("""Template arguments as JSON, e.g. '{"enable_thinking": false}'.""")
    target_layer_ids: list[int] | None = option(
        "Layers of the target that the drafter reads, counted from 0 (default: as its config says)."
    )

    def __post_init__(self) -> None:
        check_limits(self)

    def resolved(self: Options) -> Options:
        """
        Returns the options with folders or names on the Hub in place of `pair`. On a CPU, a pair that you name without
        a `dtype` runs in the pair's own precision. Progress is written to standard error.

        Raises:
            ImportError: A library that the pair needs is not installed.
            OSError: A model is missing and cannot be downloaded.
            ValueError: The options do not name both models, or name an unknown pair.
        """
        if self.pair is None:
            if self.target is None or self.assistant is None:
                raise UserValueError("Specify --pair NAME, or both --target and --assistant.")
            return self
        if self.pair not in _FOLDERS:
            known = " or ".join(f"--pair {name}" for name in _FOLDERS)
            raise UserValueError(f"There is no pair {self.pair!r}. Specify {known}, or both --target and --assistant.")
        uses_cpu = self.dtype == "auto" and not torch.accelerator.is_available()
        return replace(
            self,
            pair=None,
            assistant=self.assistant or find_drafter(self.pair),
            target=self.target or find_target(self.pair),
            dtype=cpu_dtype(self.pair) if uses_cpu else self.dtype,
        )


_BY_DEFAULT = "(default: the drafter's setting)."


@dataclass(kw_only=True)
class DraftingArguments(PairArguments):
    """The options of a pair, and settings of its drafter."""

    num_assistant_tokens: int | None = option(f"Draft tokens verified per cycle {_BY_DEFAULT}")
    branching_factor: int | None = option(f"Tokens kept at each serial step; 1 drafts a chain {_BY_DEFAULT}")
    draft_temperature: float | None = option(f"Temperature of the draft probabilities {_BY_DEFAULT}")
    break_even: float | None = option(
        f"Tokens that a drafted pass must commit to pay; with 1 the drafter never pauses {_BY_DEFAULT}", at_least=1
    )
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
