"""What a run will take: disk and memory, computed before it starts."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ...commands import UserOSError, UserValueError
from ...model.configuration_gumiho import GumihoConfig
from ...model.modeling_gumiho import GumihoModel
from ...model.target_shape import state_width
from .. import GumihoTrainingArguments
from ..feature_extraction import DEFAULT_BATCH_TOKENS, state_bytes
from .arguments import RecipeArguments


# Of the limit: how long answers are on average. Half of SmolLM2's end before 200 of 224 tokens.
ANSWER_SHARE = 0.5
_TEXT_BYTES = 6  # of a token in the file of answers
_CHECKPOINTS, _MOMENTS, _GRADIENT = 2, 8, 4  # of a phase; bytes of a trained parameter
# Float32 tensors as wide as the states that a step keeps for each token, and of the logits' size for each row of them.
_KEPT_STATES, _KEPT_LOGITS = 48, 4


class Needs(NamedTuple):
    """What a stage takes: bytes of disk, bytes of memory of a device, and what helps where that is too much."""

    disk: float = 0
    memory: float = 0
    way_out: str = ""


def estimate(
    args: RecipeArguments,
    phases: Sequence[GumihoTrainingArguments],
    target_config: PreTrainedConfig,
    drafter_config: GumihoConfig,
    num_rows: int,
    row_length: float,
) -> dict[str, Needs]:
    """Returns what each stage takes, for `num_rows` rows of `row_length` tokens on average."""
    num_tokens, config, first = num_rows * row_length, target_config.get_text_config(decoder=True), phases[0]
    dtype = target_config.dtype or torch.float32
    if args.target_dtype != "auto":
        dtype = getattr(torch, args.target_dtype)
    weights, width = num_parameters(target_config) * dtype.itemsize, state_width(config)
    with torch.device("meta"):
        drafter = GumihoModel(drafter_config)
    size = drafter.num_parameters()
    trained = sum(p.numel() for name, p in drafter.named_parameters() if not name.startswith("embed_tokens"))
    longest = min(args.max_prompt_tokens if args.writes_prompts else row_length, args.max_length) + args.max_new_tokens
    cache = args.writing_batch_size * longest * _cache_bytes(config, dtype)
    layers = drafter_config.layers_read(target_config)
    states = state_bytes(target_config, getattr(torch, args.features_dtype), layers) + 12
    # Drafter, gradient, moments, and the target's output head; the states and logits of a step.
    static = 4 * size + (_MOMENTS + _GRADIENT) * trained + config.vocab_size * width * dtype.itemsize
    split = first.world_size if first.fsdp or first.deepspeed else 1
    step = (first.tokens_per_step and first.pass_budget) or first.train_batch_size * row_length
    vocabulary = first.draft_vocabulary_size or config.vocab_size
    loss = _KEPT_LOGITS * 4 * first.loss_chunk_size * vocabulary + _KEPT_STATES * 4 * step * width
    is_online = args.features is None and args.cache_features == "false"
    needs = {
        "write": Needs(
            _TEXT_BYTES * num_tokens,
            0 if args.endpoint else weights + cache,
            "a smaller --writing_batch_size, --device_map auto, or a server (--endpoint)",
        ),
        "features": Needs(
            states * num_tokens,
            weights + _KEPT_STATES * dtype.itemsize * (first.pass_budget or DEFAULT_BATCH_TOKENS) * width,
            "--device_map auto, or a smaller --tokens_per_pass",
        ),
        "train": Needs(
            len(phases) * (_CHECKPOINTS * (4 * size + _MOMENTS * trained) + 4 * size) + 2 * size,
            static / split + loss + (weights if is_online else 0),
            "a smaller --tokens_per_pass, --per_device_train_batch_size or --loss_chunk_size, or splitting the "
            "drafter (examples/accelerate/fsdp.yaml)",
        ),
        "tune": Needs(0, weights + dtype.itemsize * size, "--device_map auto"),
        "evaluate": Needs(0, weights + dtype.itemsize * size, "--device_map auto"),
    }
    chosen = set(args.stages) - ({"write"} if not args.regenerate else set()) - ({"features"} if is_online else set())
    chosen &= {*needs} if args.features is None else {"train"}
    return {stage: need for stage, need in needs.items() if stage in chosen}


def describe(needs: dict[str, Needs]) -> str:
    """Returns the plan as a table."""
    lines = ["stage          disk     memory  (computed; the rate of each stage is shown once it runs)"]
    whole = Needs(sum(need.disk for need in needs.values()), max((n.memory for n in needs.values()), default=0))
    lines += [f"{name:<10} {_size(n.disk):>8}   {_size(n.memory):>8}" for name, n in {**needs, "all": whole}.items()]
    return "\n".join(lines)


def check_fits(needs: dict[str, Needs], folder: Path, device: torch.device, is_split: bool) -> None:
    """
    Raises `OSError` where the disk has no room for the plan, and `ValueError` where a stage needs more memory than the
    device has; the target may be split over all devices.
    """
    disk = sum(need.disk for need in needs.values())
    if disk > (free := shutil.disk_usage(folder).free):
        raise UserOSError(
            f"The run needs about {_size(disk)} in {str(folder)!r}, and {_size(free)} are free. Use a larger disk, "
            f"fewer rows, or `--cache_features false`. `--ignore_plan` starts all the same."
        )
    for stage, need in needs.items():
        has = memory_of(device) * (torch.accelerator.device_count() if is_split and stage != "train" else 1)
        if need.memory > has:
            raise UserValueError(
                f"The stage {stage!r} needs about {_size(need.memory)} of memory, and the device has {_size(has)}. "
                f"What helps: {need.way_out}. `--ignore_plan` starts all the same."
            )


def caching_pays(args: RecipeArguments, phases: Sequence[GumihoTrainingArguments], disk: float, folder: Path) -> str:
    """Returns why the states are not worth keeping: empty where they are."""
    if sum(phase.num_train_epochs for phase in phases) <= 1:
        return "the data is passed once"
    free = shutil.disk_usage(folder).free
    return f"they need {_size(disk)}, and {_size(free)} are free" if disk > free else ""


def memory_of(device: torch.device) -> int:
    """Returns the bytes of memory of a device; of one that shares it with the host those of the host."""
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).get_device_properties(device).total_memory)
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def num_parameters(target_config: PreTrainedConfig) -> int:
    """Returns the parameters of a target, which is not loaded."""
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(target_config).num_parameters())


def _cache_bytes(config: Any, dtype: torch.dtype) -> int:
    """Returns the bytes of a token in the target's cache."""
    heads = getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    cached = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * cached * width * dtype.itemsize


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
