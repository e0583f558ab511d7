"""The options that name a target and its drafter, and loading both."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ...commands import UserError, UserFileNotFoundError, UserValueError, as_user_errors, check_limits, option
from ...files import check_folder, damaged_files_named
from ...generation.verification.requirements import check_pair
from ...generation.verification.target_memory import place_of
from ...generation.verification.traits import TargetTraits, drafter_device
from ...model.decoding_settings import DraftingSettings, override_settings
from ...model.loading import is_drafter
from ...model.modeling_gumiho import GumihoModel
from ...model.mtp_checkpoint import OWN_MTP_LAYERS, check_mtp_layers
from ...training.data.open_text import load_tokenizer
from ...training.data.target_runs import ONE_ROW_EACH
from . import smollm2


Options = TypeVar("Options", bound="PairArguments")
_REPOSITORY = "https://github.com/transformers-gumiho/transformers-gumiho"


# The pairs with a short name, and the folder of the repository's `examples` that holds their drafters.
_FOLDERS = {"demo": "demo_pair", "smollm2": "smollm2"}


def find_drafter(pair: str) -> str:
    """Returns the folder of a pair's drafter."""
    return _find(f"{_FOLDERS[pair]}/gumiho")


def cpu_dtype(pair: str) -> str:
    """Returns the precision in which a CPU runs a pair."""
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
    """The options that name a target and a drafter."""

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
        Returns the options with folders or names on the Hub in place of `pair`, and on a CPU the pair's own precision.
        Raises `ValueError` if the options do not name both models, or name an unknown pair.
        """
        if self.pair is None:
            if self.target is None or self.assistant is None:
                raise UserValueError("Specify --pair NAME, or both --target and --assistant.")
            return self
        if self.pair not in _FOLDERS:
            known = " or ".join(f"--pair {name}" for name in _FOLDERS)
            raise UserValueError(f"There is no pair {self.pair!r}. Specify {known}, or both --target and --assistant.")
        uses_cpu = self.dtype == "auto" and not torch.accelerator.is_available()
        assistant = self.assistant or find_drafter(self.pair)
        target = self.target or (smollm2.find_target() if self.pair == "smollm2" else _find("demo_pair/target"))
        dtype = cpu_dtype(self.pair) if uses_cpu else self.dtype
        return replace(self, pair=None, assistant=assistant, target=target, dtype=dtype)


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
    """Returns the field of the option `prompts`; `without` says what happens without it."""
    return option(
        "Prompts: a JSONL, JSON or Parquet file with `turns`, `prompt` or `text`, or a dataset (a folder, or a name "
        f"on the Hub such as `nvidia/SPEED-Bench:qualitative`).{without}",
        default,
    )


def load_pair(args: PairArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, GumihoModel]:
    """
    Loads the target, its tokenizer and the drafter that options name. The drafter gets the target's precision and the
    settings of the options. Raises `OSError` for a missing model, and `ValueError` for an unfit drafter.
    """
    args = args.resolved()
    is_own = args.assistant == OWN_MTP_LAYERS
    if not is_own:
        check_folder(str(args.assistant), has_config=False)
    target, tokenizer = load_target(args)
    with as_user_errors():
        name, options = place_of(target) if is_own else (str(args.assistant), {})
        if is_own:
            check_mtp_layers(name, options)
        if args.target_layer_ids is not None:
            options = options | {"target_layer_ids": args.target_layer_ids}
        drafter = GumihoModel.from_pretrained(name, dtype=target.dtype, device_map=drafter_device(target), **options)
    check_pair(target, drafter)
    drafter.share_embedding(target)
    if isinstance(args, DraftingArguments):
        use_options(target, drafter, args)
    return target, tokenizer, drafter


def use_options(target: PreTrainedModel, drafter: GumihoModel, args: DraftingArguments) -> None:
    """
    Gives a drafter the settings that options name. If they change the tree, a `break_even` of its files is removed: it
    was measured with another tree, without prompt lookup. Raises `ValueError` for a setting that is out of range.
    """
    config, before = drafter.generation_config, settings_of(target, drafter)
    names = [name for name in DraftingArguments.__annotations__ if getattr(args, name) is not None]
    given = {name: getattr(args, name) for name in names if getattr(args, name) != getattr(before, name)}
    apart = {name: given.pop(name) for name in ("prompt_lookup_num_tokens", "break_even") if name in given}
    override_settings(config, **given)
    config.update(**apart)
    settings_of(target, drafter)


def settings_of(target: PreTrainedModel, drafter: GumihoModel, num_rows: int = 1) -> DraftingSettings:
    """Returns the settings for a batch. Raises `ValueError` if one is out of range."""
    has_states = TargetTraits.of(target).has_states
    return DraftingSettings.from_generation_config(
        drafter.generation_config, drafter.config, None, num_rows, drafter.device.type, has_states
    )


def load_target(args: PairArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Loads a target and its tokenizer, on the machine's accelerator if there is one. Raises `OSError` for a missing
    target, and `ValueError` for a drafter and for an unknown precision or device.
    """
    if args.target is None:
        raise UserValueError("Name the target with --target.")
    name, dtype, device_map = args.target, args.dtype, args.device_map
    check_folder(name)
    is_of_drafter = False
    with suppress(UserError):  # which loading reports
        is_of_drafter = is_drafter(name)
    if is_of_drafter:
        raise UserValueError(f"{name!r} is a drafter, not a target. Give the model that it was trained for.")
    if dtype not in ("auto", "float64", "float32", "bfloat16", "float16"):
        raise UserValueError(f"There is no precision {dtype!r}. Give 'auto', 'float32', 'bfloat16' or 'float16'.")
    here: Any = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    with suppress(RuntimeError):  # a word such as 'auto' is no device
        if torch.device(device_map or here).type not in ("cpu", here.type):
            raise UserValueError(f"There is no device {device_map!r} here. Leave the device map out, or give 'cpu'.")
    tokenizer = load_tokenizer(name, args.chat_template, args.chat_template_kwargs)
    with as_user_errors(), damaged_files_named(name):
        target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map or here)
    target.generation_config.update(**ONE_ROW_EACH)
    return target, tokenizer
