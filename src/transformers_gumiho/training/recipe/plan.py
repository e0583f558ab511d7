"""What a run will take of the disk, and on a CPU of memory, computed before it starts."""

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import torch
from datasets import config as datasets_config
from transformers import AutoModelForCausalLM

from ...commands import UserOSError
from ...model.modeling_gumiho import GumihoModel
from ...model.target_shape import state_width
from ..data.preparation import DataSize, size_of_prompts
from ..feature_cache import FeatureDataset
from ..feature_extraction import DEFAULT_BATCH_TOKENS, state_bytes
from .context import RunContext
from .target import say
from .trials import WAYS_OUT, try_stages


# Of the limit: how long answers are on average. Half of SmolLM2's end before 200 of 224 tokens.
_ANSWER_SHARE = 0.5
# Of a token: in the file of answers, and in the cache of `datasets`, with its text once, its id and whether it counts.
_TEXT_BYTES, _PREPARED_BYTES = 6, 11
_IDS_BYTES = 12  # of a token in a batch
_CHECKPOINTS, _MOMENTS, _GRADIENT = 2, 8, 4  # of a phase; bytes of a trained parameter
# Float32 tensors as wide as the states that a step keeps for each token, and of the logits' size for each row of them.
_KEPT_STATES, _KEPT_LOGITS = 48, 4
_SHARED_MEMORY = Path("/dev/shm")


class Needs(NamedTuple):
    """What a stage takes: bytes of disk, and on a CPU of memory."""

    disk: float
    memory: float


def plan_run(run: RunContext) -> None:
    """
    Prints what a run will take, and decides whether states are kept. Raises `OSError` where a disk or a CPU's memory
    has no room for it.
    """
    args, phase = run.args, run.training_args
    size = size_of_data(run)
    needs = estimate(run, size)
    if args.cache_features == "auto" and args.features is None:
        reason = _why_not_kept(run, sum(need.disk for need in needs.values()))
        args.cache_features = "false" if reason else "true"
        say(f"states: {f'the target runs in every step, as {reason}' if reason else 'kept on the disk'}")
        needs = estimate(run, size)
    say(f"{_describe(needs, run.has_accelerator)}\n{size.num_rows:,} rows of data, {size.num_tokens:,} tokens")
    say(f"optimizer: {'Muon for matrices, AdamW' if phase.muon else phase.optim.value}")
    if not args.ignore_plan:
        _check_disk(needs, 0 if args.features is not None else size.num_tokens, run.folder)
        _check_shared_memory(run)
        if not run.has_accelerator:
            _check_memory(needs)
    if args.plan and run.has_accelerator:
        try_stages(run, args.stages)


def size_of_data(run: RunContext) -> DataSize:
    """Returns the number of training rows, before packing, and of their tokens."""
    args, rows, max_length = run.args, run.rows, run.longest_row
    if args.features is not None:
        lengths = [length for folder in args.features for length in FeatureDataset(folder).lengths]
        return DataSize(len(lengths), sum(lengths))
    answer = args.max_new_tokens * _ANSWER_SHARE
    if rows is None:
        length = min(int(args.max_prompt_tokens * _ANSWER_SHARE + answer), max_length)
        return DataSize(args.num_prompts, args.num_prompts * length)
    if args.regenerate:
        return size_of_prompts(rows, answer, max_length)
    # A long text was cut into several rows.
    return DataSize(len(rows), sum(rows["num_tokens"]))


def estimate(run: RunContext, data: DataSize) -> dict[str, Needs]:
    """Returns what each stage takes, for data of this size."""
    args, first, target_config = run.args, run.training_args, run.target_config
    config = target_config.get_text_config(decoder=True)
    dtype = getattr(torch, args.target_dtype, None) or target_config.dtype or torch.float32
    width = state_width(config) * dtype.itemsize
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(target_config).num_parameters() * dtype.itemsize
        drafter = GumihoModel(run.drafter_config)
    size = drafter.num_parameters()
    trained = sum(p.numel() for name, p in drafter.named_parameters() if not name.startswith("embed_tokens"))
    states = state_bytes(target_config, getattr(torch, args.features_dtype), run.layers)
    is_online = args.features is None and args.cache_features == "false"
    # Drafter, gradient, moments, and the target's output head; the states and logits of a step.
    memory = 4 * size + (_MOMENTS + _GRADIENT) * trained + config.vocab_size * width + weights * is_online
    step = first.pass_budget or 0
    if first.tokens_per_step is None:
        step = first.train_batch_size * run.longest_row
    memory += _KEPT_LOGITS * 4 * first.loss_chunk_size * (first.draft_vocabulary_size or config.vocab_size)
    memory += _KEPT_STATES * 4 * step * state_width(config)
    checkpoints = len(run.phases) * (_CHECKPOINTS * (4 * size + _MOMENTS * trained) + 4 * size)
    needs = {"train": Needs(checkpoints + 2 * size, memory)}
    if args.features is None:
        if args.regenerate:
            row = min(data.num_tokens / max(data.num_rows, 1) + args.max_new_tokens, run.longest_row)
            cache = args.writing_batch_size * row * _cache_bytes(config, dtype)
            needs["write"] = Needs(_TEXT_BYTES * data.num_tokens, 0 if args.endpoint else weights + cache)
        if not is_online:
            batch = _KEPT_STATES * (first.pass_budget or DEFAULT_BATCH_TOKENS) * width
            needs["features"] = Needs((states + _IDS_BYTES) * data.num_tokens, weights + batch)
        needs["tune"] = needs["evaluate"] = Needs(0, weights + dtype.itemsize * size)
    return {stage: needs[stage] for stage in WAYS_OUT if stage in needs and stage in args.stages}


def _why_not_kept(run: RunContext, disk: float) -> str:
    """Returns why the states are not worth keeping: empty where they are."""
    if "features" in run.args.stages and "train" not in run.args.stages:
        return ""  # what extracts states without training is to keep them
    if sum(phase.num_train_epochs for phase in run.phases.values()) <= 1:
        return "the data is passed once"
    free = shutil.disk_usage(run.folder).free
    return f"they need {_size(disk)}, and {_size(free)} are free" if disk > free else ""


def _describe(needs: dict[str, Needs], is_tried: bool) -> str:
    largest = max((need.memory for need in needs.values()), default=0)
    rows = {**needs, "all": Needs(sum(need.disk for need in needs.values()), largest)}
    lines = ["stage          disk" + ("  (the memory is tried)" if is_tried else "     memory  (computed)")]
    for name, need in rows.items():
        lines.append(f"{name:<10} {_size(need.disk):>8}" + ("" if is_tried else f"   {_size(need.memory):>8}"))
    return "\n".join(lines)


def _check_disk(needs: dict[str, Needs], num_tokens: float, folder: Path) -> None:
    cache = Path(datasets_config.HF_DATASETS_CACHE)
    while not cache.exists():
        cache = cache.parent
    asked = {folder: sum(need.disk for need in needs.values())}
    place = folder if _disk_of(cache) == _disk_of(folder) else cache
    asked[place] = asked.get(place, 0) + _PREPARED_BYTES * num_tokens
    for place, needed in asked.items():
        way_out = "Use a larger disk, fewer rows, or `--cache_features false`"
        if place != folder:
            way_out = "The library `datasets` keeps prepared rows there: name another folder in HF_DATASETS_CACHE"
        _check("The run needs", needed, f"the disk of {str(place)!r}", shutil.disk_usage(place).free, way_out)


def _disk_of(folder: Path) -> int:
    return os.stat(folder).st_dev


def _check_memory(needs: dict[str, Needs]) -> None:
    free = psutil.virtual_memory().available
    for stage, need in needs.items():
        _check(f"The stage {stage!r} needs", need.memory, "memory", free, f"What helps: {WAYS_OUT[stage]}")


def _check_shared_memory(run: RunContext) -> None:
    phase = run.training_args
    if phase.dataloader_num_workers == 0 or not _SHARED_MEMORY.is_dir():
        return
    token_bytes = float(_IDS_BYTES)
    if run.is_cached:
        token_bytes += state_bytes(run.target_config, getattr(torch, run.args.features_dtype), run.layers)
    share = (phase.tokens_per_step or 0) // phase.world_size
    step = max(share, run.longest_row * (1 if phase.tokens_per_step else phase.train_batch_size))
    batches = phase.dataloader_num_workers * (phase.dataloader_prefetch_factor or 2)
    needed = batches * step * token_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    way_out = "Give a container more (`docker run --shm-size`), or `--dataloader_num_workers 0`"
    loaders = f"The {phase.dataloader_num_workers} workers of the loader keep"
    _check(loaders, needed, str(_SHARED_MEMORY), shutil.disk_usage(_SHARED_MEMORY).free, way_out)


def _check(who: str, needed: float, place: str, free: float, way_out: str) -> None:
    if needed > free:
        raise UserOSError(
            f"{who} about {_size(needed)} of {place}, and {_size(free)} are free. {way_out}. `--ignore_plan` starts "
            f"all the same."
        )


def _cache_bytes(config: Any, dtype: torch.dtype) -> int:
    heads = getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    cached = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * cached * width * dtype.itemsize


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
