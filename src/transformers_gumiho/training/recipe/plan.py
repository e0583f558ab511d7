"""What a run will take of the disk, and on a CPU of memory, computed before it starts."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import torch
from datasets import config as datasets_config
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ...commands import UserOSError, UserValueError
from ...model.configuration_gumiho import GumihoConfig
from ...model.modeling_gumiho import GumihoModel
from ...model.target_shape import state_width
from .. import GumihoTrainingArguments
from ..data.preparation import DataSize
from ..feature_extraction import DEFAULT_BATCH_TOKENS, state_bytes
from .arguments import RecipeArguments
from .context import RunContext
from .counting import size_of_data
from .target import load_tokenizer, say
from .trials import try_stages


# Of a token: in the file of answers, and in the cache of `datasets`, with its text once, its id and whether it counts.
_TEXT_BYTES, _PREPARED_BYTES = 6, 11
_IDS_BYTES = 12  # of a token in a batch
_CHECKPOINTS, _MOMENTS, _GRADIENT = 2, 8, 4  # of a phase; bytes of a trained parameter
# Float32 tensors as wide as the states that a step keeps for each token, and of the logits' size for each row of them.
_KEPT_STATES, _KEPT_LOGITS = 48, 4
_SHARED_MEMORY = Path("/dev/shm")


def plan_run(run: RunContext) -> None:
    """
    Prints what a run will take, and decides whether states are kept. Raises `OSError` where a disk has no room for it,
    and `ValueError` where a CPU has too little memory.
    """
    args, phases, longest = run.args, list(run.phases.values()), run.longest_row
    tokenizer = None if args.features is not None else load_tokenizer(args)
    size = size_of_data(args, run.rows, tokenizer, run.target_config)
    measures = run.target_config, run.drafter_config, size, longest
    needs = estimate(args, phases, *measures)
    if args.cache_features == "auto" and args.features is None:
        # What extracts states without training is to keep them.
        keeps = "features" in args.stages and "train" not in args.stages
        disk = sum(need.disk for need in needs.values())
        reason = "" if keeps else caching_pays(phases, disk, run.folder)
        args.cache_features = "false" if reason else "true"
        say(f"states: {f'the target runs in every step, as {reason}' if reason else 'kept on the disk'}")
        needs = estimate(args, phases, *measures)
    say(f"{describe(needs, run.has_accelerator)}\n{size.num_rows:,} rows of data, {size.num_tokens:,} tokens")
    say(f"optimizer: {'Muon for matrices, AdamW' if phases[0].muon else phases[0].optim.value}")
    if not args.ignore_plan:
        check_disk(needs, 0 if args.features is not None else size.num_tokens, run.folder)
        states = state_bytes(run.target_config, getattr(torch, args.features_dtype), run.layers)
        check_shared_memory(phases[0], _IDS_BYTES + states * run.is_cached, longest)
        if not run.has_accelerator:
            check_memory(needs)
    if args.plan and run.has_accelerator:
        try_stages(run, args.stages)


class Needs(NamedTuple):
    """What a stage takes: bytes of disk, on a CPU bytes of memory, and what helps where that is too much."""

    disk: float = 0
    memory: float = 0
    way_out: str = ""


def estimate(
    args: RecipeArguments,
    phases: Sequence[GumihoTrainingArguments],
    target_config: PreTrainedConfig,
    drafter_config: GumihoConfig,
    data: DataSize,
    longest_row: int,
) -> dict[str, Needs]:
    """Returns what each stage takes, for data of this size."""
    config, first = target_config.get_text_config(decoder=True), phases[0]
    dtype = target_config.dtype or torch.float32
    if args.target_dtype != "auto":
        dtype = getattr(torch, args.target_dtype)
    weights, width = num_parameters(target_config) * dtype.itemsize, state_width(config)
    with torch.device("meta"):
        drafter = GumihoModel(drafter_config)
    size = drafter.num_parameters()
    trained = sum(p.numel() for name, p in drafter.named_parameters() if not name.startswith("embed_tokens"))
    states = state_bytes(target_config, getattr(torch, args.features_dtype), drafter_config.layers_read(target_config))
    # Drafter, gradient, moments, and the target's output head; the states and logits of a step.
    static = 4 * size + (_MOMENTS + _GRADIENT) * trained + config.vocab_size * width * dtype.itemsize
    step = first.pass_budget if first.tokens_per_step is not None else first.train_batch_size * longest_row
    vocabulary = first.draft_vocabulary_size or config.vocab_size
    loss = _KEPT_LOGITS * 4 * first.loss_chunk_size * vocabulary + _KEPT_STATES * 4 * (step or 0) * width
    is_online = args.features is None and args.cache_features == "false"
    batch = _KEPT_STATES * dtype.itemsize * (first.pass_budget or DEFAULT_BATCH_TOKENS) * width
    written = min(data.num_tokens / max(data.num_rows, 1) + args.max_new_tokens, longest_row)  # tokens of a long row
    cache = args.writing_batch_size * written * _cache_bytes(config, dtype)
    needs = {
        "write": Needs(
            _TEXT_BYTES * data.num_tokens,
            0 if args.endpoint else weights + cache,
            "a smaller --writing_batch_size or --max_new_tokens, or a server (--endpoint)",
        ),
        "features": Needs((states + _IDS_BYTES) * data.num_tokens, weights + batch, "a smaller --tokens_per_pass"),
        "train": Needs(
            len(phases) * (_CHECKPOINTS * (4 * size + _MOMENTS * trained) + 4 * size) + 2 * size,
            static + loss + (weights if is_online else 0),
            "a smaller --tokens_per_pass, --per_device_train_batch_size or --loss_chunk_size",
        ),
    }
    decoding = Needs(0, weights + dtype.itemsize * size, "a target in bfloat16 (--target_dtype)")
    needs |= {"tune": decoding, "evaluate": decoding}
    chosen = set(args.stages) - ({"write"} if not args.regenerate else set()) - ({"features"} if is_online else set())
    chosen &= {*needs} if args.features is None else {"train"}
    return {stage: need for stage, need in needs.items() if stage in chosen}


def describe(needs: dict[str, Needs], is_tried: bool) -> str:
    """Returns the plan as a table; what `is_tried` is not computed."""
    largest = max((need.memory for need in needs.values()), default=0)
    rows = {**needs, "all": Needs(sum(need.disk for need in needs.values()), largest)}
    lines = ["stage          disk" + ("  (the memory is tried)" if is_tried else "     memory  (computed)")]
    for name, need in rows.items():
        lines.append(f"{name:<10} {_size(need.disk):>8}" + ("" if is_tried else f"   {_size(need.memory):>8}"))
    return "\n".join(lines)


def check_disk(needs: dict[str, Needs], num_tokens: float, folder: Path) -> None:
    """Raises `OSError` where a disk has no room for what goes on it: the run's, and that of the `datasets` cache."""
    cache = Path(datasets_config.HF_DATASETS_CACHE)
    while not cache.exists():
        cache = cache.parent
    asked = {folder: sum(need.disk for need in needs.values())}
    place = folder if _disk_of(cache) == _disk_of(folder) else cache
    asked[place] = asked.get(place, 0) + _PREPARED_BYTES * num_tokens
    for place, needed in asked.items():
        if needed > (free := shutil.disk_usage(place).free):
            way_out = "Use a larger disk, fewer rows, or `--cache_features false`"
            if place != folder:
                way_out = "The library `datasets` keeps prepared rows there: name another folder in HF_DATASETS_CACHE"
            raise UserOSError(
                f"The run needs about {_size(needed)} in {str(place)!r}, and {_size(free)} are free. {way_out}. "
                f"`--ignore_plan` starts all the same."
            )


def _disk_of(folder: Path) -> int:
    return os.stat(folder).st_dev


def check_memory(needs: dict[str, Needs]) -> None:
    """Raises `ValueError` where a stage needs more memory than is free, on a CPU."""
    free = free_memory()
    for stage, need in needs.items():
        if need.memory > free:
            raise UserValueError(
                f"The stage {stage!r} needs about {_size(need.memory)} of memory, and {_size(free)} are free. What "
                f"helps: {need.way_out}. `--ignore_plan` starts all the same."
            )


def check_shared_memory(phase: GumihoTrainingArguments, token_bytes: float, longest_row: int) -> None:
    """Raises `OSError` where workers of the loader have no room for what they load ahead."""
    if phase.dataloader_num_workers == 0 or not _SHARED_MEMORY.is_dir():
        return
    share = (phase.tokens_per_step or 0) // phase.world_size
    step = max(share, longest_row * (1 if phase.tokens_per_step else phase.train_batch_size))
    batches = phase.dataloader_num_workers * (phase.dataloader_prefetch_factor or 2)
    needed = batches * step * token_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if needed > (free := shutil.disk_usage(_SHARED_MEMORY).free):
        raise UserOSError(
            f"The {phase.dataloader_num_workers} workers of the loader keep about {_size(needed)} in "
            f"{str(_SHARED_MEMORY)!r}, and {_size(free)} are free. Give a container more (`docker run --shm-size`), "
            f"or `--dataloader_num_workers 0`. `--ignore_plan` starts all the same."
        )


def caching_pays(phases: Sequence[GumihoTrainingArguments], disk: float, folder: Path) -> str:
    """Returns why the states are not worth keeping: empty where they are."""
    if sum(phase.num_train_epochs for phase in phases) <= 1:
        return "the data is passed once"
    free = shutil.disk_usage(folder).free
    return f"they need {_size(disk)}, and {_size(free)} are free" if disk > free else ""


def free_memory() -> int:
    """Returns the bytes of the host's memory that are free."""
    return int(psutil.virtual_memory().available)


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
