"""Writing a feature cache: the target runs once over a prepared dataset."""

import errno
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import has_length

from ..commands import UserOSError, UserValueError
from ..generation.verification.placement import input_device
from ..generation.verification.target_states import TargetStates
from ..model.target_shape import TargetLayers, resolve_layer_ids, state_width
from ..model.token_embedding import fitting_rows
from .collator import OTHER_MARKS, TEXT_NUMBERS, GumihoDataCollator, loss_mask_of, positions_of
from .data.bars import progress_bar
from .data.budget import within_budget
from .data.fingerprint import conversations_fingerprint, model_fingerprint, tokenizer_fingerprints
from .data.run_files import Record, sole_writer
from .data.target_runs import why_not_finite
from .feature_cache import (
    MADE_FROM,
    TARGET_FOLDER,
    WEIGHTS,
    CacheManifest,
    is_intact,
    layer_fields,
    row_lengths,
    save_completely,
    save_shard,
)
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
    again, and rewrites damaged files. Several processes (`accelerate launch`) share the shards.

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
    found = getattr(dataset, "column_names", None) or ()
    if "input_ids" not in found or not has_length(dataset) or not len(dataset):
        raise UserValueError(
            f"Features are those of the `input_ids` of a `datasets.Dataset` with rows, got {dataset!s:.100}. Prepare "
            f"it with `prepare_dataset`."
        )
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UserValueError(f"`dtype` must be a floating one such as `torch.bfloat16`, got {dtype!r}.")
    folder, state = Path(folder).absolute(), PartialState()
    folder.mkdir(parents=True, exist_ok=True)
    layers = _layers(target.config, target_layer_ids)
    features, columns = OnlineFeatures(target, layers), _columns(dataset)
    if "loss_mask" not in dataset.column_names and "loss_mask" in columns:
        dataset = dataset.map(_marked)
    if "position_ids" not in dataset.column_names and "position_ids" in columns:
        dataset = dataset.map(lambda row: {"position_ids": positions_of(row) or [*range(len(row["input_ids"]))]})
    lengths = row_lengths(dataset) or []
    size = cache_size(dataset, target.config, dtype, layers)
    manifest = CacheManifest(
        columns=columns,
        dtype=str(dtype).removeprefix("torch."),
        target_name=target.config.name_or_path,
        lengths=lengths,
        rows_per_shard=max(int(shard_bytes // (size / sum(lengths) * max(lengths))), 1),
        machine=platform.node(),
        **layer_fields(layers),
    )
    model = model_fingerprint(target)
    if made_from is None:
        data = conversations_fingerprint(dataset.select_columns(columns))
        made_from = {"target": model, "data": data, **tokenizer_fingerprints(tokenizer)}
    made_from = made_from | {"dtype": manifest.dtype, **layer_fields(layers)}
    record, shards = Record(folder / MADE_FROM), manifest.shards(folder)
    with sole_writer(folder) if state.is_main_process else nullcontext():
        record.check(made_from, "Extract features into another folder, or delete this one.")
        state.wait_for_everyone()
        if state.is_main_process:
            _forget_other_rows(folder, manifest)
            _check_space(folder, size * sum(not path.exists() for path in shards) // len(shards))
            record.write(made_from | {"model": model})
            _write_target(target, tokenizer, folder, manifest)
        state.wait_for_everyone()
        # Each process has its shards whatever the others have written meanwhile.
        mine = range(state.process_index, len(shards), state.num_processes)
        missing = {index: shards[index] for index in mine if not is_intact(shards[index])}
        total = sum(lengths[row] for index in missing for row in manifest.rows_of(index))
        is_shown = bool(missing) and state.is_local_main_process
        with progress_bar(
            desc="extracting features", total=total, unit="token", unit_scale=True, disable=not is_shown
        ) as bar:
            _write_shards(dataset, missing, features, manifest, tokens_per_batch, bar.update)
        state.wait_for_everyone()
        if state.is_main_process:
            record.write(made_from | {"model": model}, is_finished=True)


def _write_shards(
    dataset: "Dataset",
    missing: dict[int, Path],
    features: OnlineFeatures,
    manifest: CacheManifest,
    tokens_per_batch: int,
    report: Callable[[int], Any],
) -> None:
    """Writes these shards: each while the target runs over the rows of the next one."""
    saving: Future[None] | None = None
    with ThreadPoolExecutor(1) as disk:
        for index, path in missing.items():
            rows: Rows = {}
            for found in _extract(dataset, manifest.rows_of(index), features, manifest, tokens_per_batch):
                rows |= found
                report(sum(manifest.lengths[row] for row in found))
            if saving is not None:
                saving.result()
            saving = disk.submit(save_shard, [rows[row] for row in manifest.rows_of(index)], path)
        if saving is not None:
            saving.result()


def _extract(
    dataset: "Dataset", rows: range, features: OnlineFeatures, manifest: CacheManifest, tokens_per_batch: int
) -> Iterator[Rows]:
    """Yields the rows of a shard, those of like length together."""
    collate = GumihoDataCollator(features.config.get_text_config(decoder=True).vocab_size)
    device = input_device(features.target)
    arrive: Callable[[], Rows] | None = None
    for batch in within_budget(rows, manifest.lengths, tokens_per_batch):
        chosen = {index: dataset[index] for index in batch}
        states = features.states({name: t.to(device) for name, t in collate(list(chosen.values())).items()})
        # The host takes the states of a batch while the device computes those of the next one.
        before, arrive = arrive, _send_to_host(chosen, states, features, manifest)
        if before is not None:
            yield before()
    if arrive is not None:
        yield arrive()


def _send_to_host(
    chosen: dict[int, dict[str, Any]], states: TargetStates, features: OnlineFeatures, manifest: CacheManifest
) -> Callable[[], Rows]:
    """
    Begins to copy the states of a batch. The function that it returns waits for them, and returns the rows; it raises
    `ValueError` where states are not finite in the cache's dtype.
    """
    on_device = {"hidden_states": states.last}
    if features.layers is not None:
        width = len(features.layers.besides_last_states(features.config)) * states.last.shape[-1]
        on_device["layer_states"] = states.target_states[..., :width]
    dtype = getattr(torch, manifest.dtype)
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
            index: {name: torch.tensor(row[name], dtype=torch.int32, device="cpu") for name in manifest.columns}
            | {name: kept[number, : manifest.lengths[index]] for name, kept in on_host.items()}
            for number, (index, row) in enumerate(chosen.items())
        }

    return arrive


def _refuse(states: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises `ValueError` for states that are not finite in this dtype."""
    if not torch.isfinite(states).all():
        raise UserValueError(why_not_finite(states.dtype))
    wider = torch.bfloat16 if dtype == torch.float16 else torch.float32
    raise UserValueError(f"The target's states are too large for {dtype}. Keep them as {wider} (`--features_dtype`).")


def _write_target(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, manifest: CacheManifest
) -> None:
    """Writes what a cache knows of its target, and the manifest at last, where these are not there or damaged."""
    try:
        if CacheManifest.load(folder) == manifest and is_intact(folder / TARGET_FOLDER / WEIGHTS):
            return
    except (FileNotFoundError, ValueError):
        pass
    write_target(target, tokenizer, folder)
    manifest.save(folder)


def _forget_other_rows(folder: Path, manifest: CacheManifest) -> None:
    """Deletes shards that hold other rows than these, as after a difference that the user accepted."""
    with suppress(FileNotFoundError, ValueError):
        if CacheManifest.load(folder).lengths != manifest.lengths:
            for path in folder.glob("shard-*.safetensors"):
                path.unlink()


def write_target(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes what a cache knows of its target."""
    for path in folder.glob("*.partial"):
        path.unlink()
    embedding = target.get_input_embeddings().weight
    weights = {"embed_tokens.weight": fitting_rows(embedding, *embedding.shape)} | _head_weights(target)
    for part in (target.config, tokenizer):
        part.save_pretrained(folder / TARGET_FOLDER)
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    save_completely(weights, folder / TARGET_FOLDER / WEIGHTS)


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
    """Raises `OSError` where the shards that are missing will not fit on the disk."""
    if needed > (free := shutil.disk_usage(folder).free):
        raise UserOSError(
            errno.ENOSPC,
            f"The features need {needed / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free. Use a larger disk, less "
            f"data, or train with the target running in every step",
            str(folder),
        )


@torch.no_grad()
def _head_weights(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the weight and bias of the output head; of a wrapped one (adapters, offloading) those it amounts to."""
    head = target.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.device.type != "meta":
        return {f"lm_head.{name}": parameter for name, parameter in head.named_parameters()}
    width = getattr(head, "in_features", target.get_input_embeddings().weight.shape[1])
    probe = torch.eye(width, dtype=target.dtype, device=input_device(target))
    bias = head(torch.zeros_like(probe[:1]))[0]
    return {"lm_head.weight": (head(probe) - bias).T, "lm_head.bias": bias}
