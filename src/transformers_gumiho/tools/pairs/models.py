"""Loading the models that a command's options name."""

from contextlib import suppress
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ...commands import UserError, UserValueError, as_user_errors
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
from .arguments import DraftingArguments, PairArguments


def load_pair(args: PairArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, GumihoModel]:
    """
    Loads the target, its tokenizer and the drafter that options name. The drafter goes next to the target, in the
    target's precision, with the settings that the options give. Progress is written to standard error.

    Raises:
        ImportError: A library that the pair needs is not installed.
        OSError: A model is missing and cannot be downloaded.
        ValueError: The options do not name both models, the precision or device is unknown, or the drafter does not
            fit the target.
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
    Gives a drafter the settings that options name. If these change the tree, a `break_even` of the drafter's files is
    removed, because it was measured with another tree. Prompt lookup does not change it: it was measured without.

    Raises:
        ValueError: A setting is out of range.
    """
    config, before = drafter.generation_config, settings_of(target, drafter)
    names = [name for name in DraftingArguments.__annotations__ if getattr(args, name) is not None]
    given = {name: getattr(args, name) for name in names if getattr(args, name) != getattr(before, name)}
    apart = {name: given.pop(name) for name in ("prompt_lookup_num_tokens", "break_even") if name in given}
    override_settings(config, **given)
    config.update(**apart)
    settings_of(target, drafter)


def settings_of(target: PreTrainedModel, drafter: GumihoModel, num_rows: int = 1) -> DraftingSettings:
    """Returns the settings with which the drafter drafts for a batch. Raises `ValueError` if one is out of range."""
    has_states = TargetTraits.of(target).has_states
    return DraftingSettings.from_generation_config(
        drafter.generation_config, drafter.config, None, num_rows, drafter.device.type, has_states
    )


def load_target(args: PairArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Loads the target that `args.target` names, and its tokenizer, on the machine's accelerator if there is one.

    Raises:
        OSError: The target is missing and cannot be downloaded.
        ValueError: No target is named, the precision or device is unknown, or the target is a drafter.
    """
    if args.target is None:
        raise UserValueError("Name the target with --target.")
    name, dtype, device_map = args.target, args.dtype, args.device_map
    check_folder(name)
    is_of_drafter = False
    with suppress(UserError):  # which loading reports
        is_of_drafter = is_drafter(name)
    if is_of_drafter:
        raise UserValueError(
            f"{name!r} is a drafter, not a target. Give the model that it was trained for as the target."
        )
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
