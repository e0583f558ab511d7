"""Writing a feature cache: the target runs once over a prepared dataset."""

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import has_length

from ..commands import UserOSError, UserValueError
from ..generation.verification.target_states import TargetStates
from ..generation.verification.traits import input_device
from ..model.target_shape import TargetLayers, resolve_layer_ids, state_width
from .cache_writer import CacheWriter, delete_unfit, missing_rows, write_target
from .collator import OTHER_MARKS, TEXT_NUMBERS, GumihoDataCollator, loss_mask_of, positions_of
from .data.bars import progress_bar
from .data.budget import within_budget
from .data.fingerprint import conversations_fingerprint, model_fingerprint, tokenizer_fingerprints
from .data.manifest import Manifest
from .data.run_files import sole_writer
from .data.target_runs import why_not_finite
from .feature_cache import check_version, layer_fields, row_lengths
from .target_features import OnlineFeatures


if TYPE_CHECKING:
    from datasets import Dataset

DEFAULT_SHARD_BYTES, DEFAULT_BATCH_TOKENS = 2**29, 2048
Rows = dict[int, dict[str, torch.Tensor]]  # by their index


def cache_size(
    dataset: "Dataset",
    target_config: PreTrainedConfig,
    dtype: torch.dtype,
    target_layer_ids: Sequence[int] | TargetLayers | None = None,
) -> int:
    """Returns the bytes that the features of a prepared dataset will take; arguments as in [`write_feature_cache`]."""
    layers = _layers(target_config, target_layer_ids)
    token_bytes = state_bytes(target_config, dtype, layers) + 4 * len(_columns(dataset))
    return sum(row_lengths(dataset) or ()) * token_bytes


def state_bytes(target_config: PreTrainedConfig, dtype: torch.dtype, layers: TargetLayers | None) -> int:
    """Returns the bytes of the states of one token in a cache."""
    num_kept = 1 if layers is None else 1 + len(layers.besides_last_states(target_config))
    return state_width(target_config.get_text_config(decoder=True)) * dtype.itemsize * num_kept


def _layers(target_config: PreTrainedConfig, layers: Sequence[int] | TargetLayers | None) -> TargetLayers | None:
    if layers is None or isinstance(layers, TargetLayers):
        return layers
    return TargetLayers.of(resolve_layer_ids(target_config, layers))


def write_feature_cache(
    dataset: "Dataset",
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
        ValueError: The folder holds a cache of something else, the dataset has no rows of `input_ids` that the target
            knows, the target does not have these layers, or the features do not fit into `dtype`.
        OSError: The disk is too small or full, or another run writes there. What is written stays.
    """
    rows = _checked(dataset, dtype)
    folder, state = Path(folder).absolute(), PartialState()
    layers = _layers(target.config, target_layer_ids)
    features, lengths, model = OnlineFeatures(target, layers), row_lengths(rows) or [], model_fingerprint(target)
    if made_from is None:
        made_from = {"target": model, "data": conversations_fingerprint(rows), **tokenizer_fingerprints(tokenizer)}
    made_from = made_from | {"dtype": str(dtype).removeprefix("torch."), **layer_fields(layers)}
    facts = {"model": model, "num_rows": len(rows), "target_name": target.config.name_or_path}
    folder.mkdir(parents=True, exist_ok=True)
    with sole_writer(folder) if state.is_main_process else nullcontext():
        check_version(folder)
        manifest = Manifest(folder)
        manifest.check(made_from, "Extract features into another folder, or delete this one.")
        state.wait_for_everyone()
        if state.is_main_process:
            delete_unfit(folder, lengths)
            missing = missing_rows(folder, lengths)
            _check_space(folder, cache_size(rows.select(missing), target.config, dtype, layers))
            manifest.write(made_from | facts)
            write_target(target, tokenizer, folder)
        state.wait_for_everyone()
        batches = within_budget(missing_rows(folder, lengths), lengths, tokens_per_batch)
        state.wait_for_everyone()  # all have seen what is missing before one writes
        batches = batches[state.process_index :: state.num_processes]
        num_tokens = sum(lengths[row] for batch in batches for row in batch)
        settings = {"unit": "token", "unit_scale": True, "disable": not (batches and state.is_local_main_process)}
        with progress_bar(desc="extracting features", total=num_tokens, **settings) as bar:
            found = _extract(rows, batches, features, dtype, bar.update)
            _save_rows(found, CacheWriter(folder, state.process_index), shard_bytes)
        state.wait_for_everyone()
        if state.is_main_process:
            manifest.write(made_from | facts, is_finished=True)


def _checked(dataset: Any, dtype: torch.dtype) -> "Dataset":
    """Returns the columns of a dataset that a cache holds; raises `ValueError` for what has no features."""
    found = getattr(dataset, "column_names", None) or ()
    if "input_ids" not in found or not has_length(dataset) or not len(dataset):
        raise UserValueError(
            f"Features are those of the `input_ids` of a `datasets.Dataset` with rows, got {dataset!s:.100}. Prepare "
            f"it with `prepare_dataset`."
        )
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UserValueError(f"`dtype` must be a floating one such as `torch.bfloat16`, got {dtype!r}.")
    columns = _columns(dataset)
    if "loss_mask" not in found and "loss_mask" in columns:
        dataset = dataset.map(_marked)
    if "position_ids" not in found and "position_ids" in columns:
        dataset = dataset.map(lambda row: {"position_ids": positions_of(row) or [*range(len(row["input_ids"]))]})
    return dataset.select_columns(columns)


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
    dataset: "Dataset", batches: list[list[int]], features: OnlineFeatures, dtype: torch.dtype,
    report: Callable[[int], Any],
) -> Iterator[Rows]:  # fmt: skip
    """Yields the rows of each batch."""
    collate = GumihoDataCollator(features.config.get_text_config(decoder=True).vocab_size)
    device = input_device(features.target)
    arrive: Callable[[], Rows] | None = None
    for batch in batches:
        chosen = {index: dataset[index] for index in batch}
        states = features.states({name: t.to(device) for name, t in collate(list(chosen.values())).items()})
        # The host takes the states of a batch while the device computes those of the next one.
        before, arrive = arrive, _send_to_host(chosen, states, features, dtype)
        if before is not None:
            yield before()
        report(sum(len(row["input_ids"]) for row in chosen.values()))
    if arrive is not None:
        yield arrive()


def _send_to_host(
    chosen: dict[int, dict[str, Any]], states: TargetStates, features: OnlineFeatures, dtype: torch.dtype
) -> Callable[[], Rows]:
    """
    Begins to copy the states of a batch. The function that it returns waits for them, and returns the rows; it raises
    `ValueError` where states are not finite in the cache's dtype.
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
                _refuse(on_device[name], kept.dtype)
        return {
            index: {name: torch.tensor(values, dtype=torch.int32, device="cpu") for name, values in row.items()}
            | {name: kept[number, : len(row["input_ids"])] for name, kept in on_host.items()}
            for number, (index, row) in enumerate(chosen.items())
        }

    return arrive


def _refuse(states: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises `ValueError` for states that are not finite in this dtype."""
    if not torch.isfinite(states).all():
        raise UserValueError(why_not_finite(states.dtype))
    wider = torch.bfloat16 if dtype == torch.float16 else torch.float32
    raise UserValueError(f"The target's states are too large for {dtype}. Keep them as {wider} (`--features_dtype`).")


def _marked(row: dict[str, Any]) -> dict[str, list[int]]:
    """Returns which states of a row count, as other libraries' marks say."""
    positions = positions_of(row)
    return {"loss_mask": loss_mask_of(row, None if positions is None else torch.tensor(positions)).tolist()}


def _columns(dataset: "Dataset") -> list[str]:
    found = set(dataset.column_names)
    found |= {"loss_mask"} if found & {*OTHER_MARKS} else set()
    found |= {"position_ids"} if found & {"seq_lengths", *TEXT_NUMBERS} and any(map(positions_of, dataset)) else set()
    return [name for name in ("input_ids", "loss_mask", "position_ids") if name in found]


def _check_space(folder: Path, needed: int) -> None:
    """Raises `OSError` where the rows that are missing will not fit on the disk."""
    if needed > (free := shutil.disk_usage(folder).free):
        raise UserOSError(
            errno.ENOSPC,
            f"The features need {needed / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free. Use a larger disk, less "
            f"data, or train with the target running in every step",
            str(folder),
        )
