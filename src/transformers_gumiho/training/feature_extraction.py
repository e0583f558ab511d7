"""Writing a feature cache: the target runs once over a prepared dataset."""

import errno
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..commands import UserOSError, UserValueError
from ..generation.verification.target_states import TargetStates
from ..generation.verification.traits import input_device
from ..model.target_shape import TargetLayers, resolve_layer_ids, state_width
from .collator import TEXT_NUMBERS, GumihoDataCollator, positions_of
from .data.bars import progress_bar
from .data.budget import within_budget
from .data.fingerprint import conversations_fingerprint, model_fingerprint, tokenizer_fingerprints
from .data.manifest import Manifest
from .data.preparation import plain_rows
from .data.run_files import sole_writer
from .data.target_runs import why_not_finite
from .feature_cache import CacheWriter, delete_unfit, layer_fields, missing_rows, row_lengths, write_target
from .target_features import OnlineFeatures


DEFAULT_SHARD_BYTES, DEFAULT_BATCH_TOKENS = 2**29, 2048
Rows = dict[int, dict[str, torch.Tensor]]  # by their index


def cache_size(
    dataset: Dataset,
    target_config: PreTrainedConfig,
    dtype: torch.dtype,
    target_layer_ids: Sequence[int] | TargetLayers | None = None,
) -> int:
    """Returns the bytes that the features of a prepared dataset will take; arguments as in [`write_feature_cache`]."""
    states = state_bytes(target_config, dtype, _layers(target_config, target_layer_ids))
    return sum(row_lengths(dataset) or ()) * (states + 4 * len(_columns(dataset)))


def state_bytes(target_config: PreTrainedConfig, dtype: torch.dtype, layers: TargetLayers | None) -> int:
    """Returns the bytes of the states of one token in a cache."""
    num_kept = 1 if layers is None else 1 + len(layers.besides_last_states(target_config))
    return state_width(target_config.get_text_config(decoder=True)) * dtype.itemsize * num_kept


def _layers(target_config: PreTrainedConfig, layers: Sequence[int] | TargetLayers | None) -> TargetLayers | None:
    if layers is None or isinstance(layers, TargetLayers):
        return layers
    return TargetLayers.of(resolve_layer_ids(target_config, layers))


def _columns(dataset: Dataset) -> list[str]:
    """Returns the columns of a cache: positions only where marks of any library say that a row holds several texts."""
    found = {*dataset.column_names}
    columns = ["input_ids", "loss_mask"]
    is_packed = "position_ids" in found
    if not is_packed and found & {"seq_lengths", *TEXT_NUMBERS}:
        is_packed = any(positions_of(row) is not None for row in dataset)
    return [*columns, "position_ids"] if is_packed else columns


def write_feature_cache(
    dataset: Dataset,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tokens_per_batch: int = DEFAULT_BATCH_TOKENS,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    target_layer_ids: Sequence[int] | TargetLayers | None = None,
    made_from: dict[str, Any] | None = None,
) -> None:
    """
    Runs the target over a prepared dataset and writes its last hidden states. Stopped, it continues when it is called
    again, with the rows that no complete shard holds. Several processes (`accelerate launch`) share these.

    Args:
        dataset: From [`prepare_dataset`].
        target: The target.
        tokenizer: The target's.
        folder: Where the cache goes.
        dtype: Of the features.
        tokens_per_batch: Tokens that the target reads at a time, padding included; a batch has at least one row.
        shard_bytes: Size of a shard, at most; a shard has at least one row.
        target_layer_ids: Layers whose states are written next to the last ones, as in [`GumihoConfig`], or what a
            drafter's `config.layers_read(target.config)` returns. Drafters of the last states can be trained on such a
            cache, too.
        made_from: What identifies the cache, where that is known without looking at the loaded target and the rows.

    Raises:
        ValueError: The folder holds a cache of something else, the dataset is a stream, empty or has tokens that the
            target lacks, the target does not have these layers, or the features do not fit into `dtype`.
        OSError: The disk is too small or full, or another run writes there. What is written stays.
    """
    dataset = plain_rows(dataset)
    folder, state = Path(folder).absolute(), PartialState()
    layers = _layers(target.config, target_layer_ids)
    lengths = row_lengths(dataset) or []
    features, model = OnlineFeatures(target, layers), model_fingerprint(target)
    if made_from is None:
        made_from = {"target": model, "data": conversations_fingerprint(dataset), **tokenizer_fingerprints(tokenizer)}
    made_from = made_from | {"dtype": str(dtype).removeprefix("torch."), **layer_fields(layers)}
    facts = {"model": model, "num_rows": len(dataset), "target_name": target.config.name_or_path}
    folder.mkdir(parents=True, exist_ok=True)
    with sole_writer(folder) if state.is_main_process else nullcontext():
        manifest = Manifest(folder)
        manifest.check(made_from, "Extract features into another folder, or delete this one.")
        state.wait_for_everyone()
        if state.is_main_process:
            delete_unfit(folder, lengths)
            missing = missing_rows(folder, lengths)
            _check_space(folder, cache_size(dataset.select(missing), target.config, dtype, layers))
            manifest.write(made_from | facts)
            write_target(target, tokenizer, folder)
        state.wait_for_everyone()
        batches = within_budget(missing_rows(folder, lengths), lengths, tokens_per_batch)
        state.wait_for_everyone()  # all have seen what is missing before one writes
        batches = batches[state.process_index :: state.num_processes]
        num_tokens = sum(lengths[row] for batch in batches for row in batch)
        settings = {"unit": "token", "unit_scale": True, "disable": not (batches and state.is_local_main_process)}
        with progress_bar(desc="extracting features", total=num_tokens, **settings) as bar:
            found = _extract(dataset, batches, features, dtype, bar.update)
            _save_rows(found, CacheWriter(folder, state.process_index), shard_bytes)
        state.wait_for_everyone()
        if state.is_main_process:
            manifest.write(made_from | facts, is_finished=True)


def _save_rows(found: Iterator[Rows], writer: CacheWriter, shard_bytes: int) -> None:
    """Writes rows into shards: each while the target runs over the rows of the next one."""
    rows: Rows = {}
    num_bytes, saving = 0, None
    with ThreadPoolExecutor(1) as disk:
        for number, row in (item for batch in found for item in batch.items()):
            size = sum(tensor.nbytes for tensor in row.values())
            if rows and num_bytes + size > shard_bytes:
                if saving is not None:
                    saving.result()
                saving, rows, num_bytes = disk.submit(writer.save, rows), {}, 0
            rows[number] = row
            num_bytes += size
        if saving is not None:
            saving.result()
    if rows:
        writer.save(rows)


def _extract(
    dataset: Dataset, batches: list[list[int]], features: OnlineFeatures, dtype: torch.dtype,
    report: Callable[[int], Any],
) -> Iterator[Rows]:  # fmt: skip
    """Yields the rows of each batch: the host takes its states while the device computes those of the next one."""
    collate = GumihoDataCollator(features.config.get_text_config(decoder=True).vocab_size)
    columns = _columns(dataset)
    device = input_device(features.target)
    arriving: deque[Callable[[], Rows]] = deque()
    for numbers in batches:
        chosen = [dataset[number] for number in numbers]
        batch = collate(chosen)
        lengths = [len(row["input_ids"]) for row in chosen]
        states = features.states({name: tensor.to(device) for name, tensor in batch.items()})
        positions = torch.arange(batch["input_ids"].shape[1], device="cpu")
        batch.setdefault("position_ids", positions.expand(len(chosen), -1))
        of_tokens = {name: batch[name].int() for name in columns}
        of_rows = dict(zip(numbers, lengths, strict=True))
        arriving.append(_send_to_host(of_rows, of_tokens, states, features, dtype))
        if len(arriving) > 1:
            yield arriving.popleft()()
        report(sum(lengths))
    yield from (arrive() for arrive in arriving)


def _send_to_host(
    lengths: dict[int, int], of_tokens: dict[str, torch.Tensor], states: TargetStates, features: OnlineFeatures,
    dtype: torch.dtype,
) -> Callable[[], Rows]:  # fmt: skip
    """
    Begins to copy the states of rows of these lengths, by their numbers. The function that it returns waits for them,
    and returns the rows; it raises `ValueError` where states are not finite in the cache's dtype.
    """
    on_device = {"hidden_states": states.last}
    if features.layers is not None:
        width = len(features.layers.besides_last_states(features.config)) * states.last.shape[-1]
        on_device["layer_states"] = states.target_states[..., :width]
    on_host = {name: tensor.to(dtype).to("cpu", non_blocking=True) for name, tensor in on_device.items()}
    copied = None if states.last.device.type == "cpu" else torch.Event(states.last.device)
    if copied is not None:
        copied.record(torch.accelerator.current_stream(states.last.device))

    def arrive() -> Rows:
        if copied is not None:
            copied.synchronize()
        for name, kept in on_host.items():
            if not torch.isfinite(kept).all():
                if not torch.isfinite(on_device[name]).all():
                    raise UserValueError(why_not_finite(on_device[name].dtype))
                wider = torch.bfloat16 if dtype == torch.float16 else torch.float32
                raise UserValueError(
                    f"The target's states are too large for {dtype}. Keep them as {wider} (`--features_dtype`)."
                )
        columns = of_tokens | on_host
        return {
            number: {name: tensor[place, :length] for name, tensor in columns.items()}
            for place, (number, length) in enumerate(lengths.items())
        }

    return arrive


def _check_space(folder: Path, needed: int) -> None:
    if needed > (free := shutil.disk_usage(folder).free):
        raise UserOSError(
            errno.ENOSPC,
            f"The features need {needed / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free. Use a larger disk, less "
            f"data, or train with the target running in every step",
            str(folder),
        )
