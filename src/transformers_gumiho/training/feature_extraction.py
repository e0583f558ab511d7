"""Writing a feature cache: the target runs once over a prepared dataset."""

import errno
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..model.configuration_gumiho import resolve_layer_ids
from ..model.target_shape import state_width
from ..model.token_embedding import fitting_rows
from ..resumable_file import sole_writer, way_out
from ..user_errors import UserOSError
from ..verification.fingerprint import model_fingerprint
from ..verification.placement import input_device
from .collator import OTHER_MARKS, GumihoDataCollator, loss_mask_of
from .feature_cache import MANIFEST, TARGET_FOLDER, WEIGHTS, CacheManifest, kept_layers
from .fingerprint import rows_fingerprint, tokenizer_fingerprints
from .shards import checksum, is_intact, load_weights, make_shard, shard_path
from .target_features import OnlineFeatures, stored_states


DEFAULT_SHARD_BYTES = 2**29


def cache_size(
    dataset: Dataset,
    target_config: PreTrainedConfig,
    dtype: torch.dtype,
    target_layer_ids: Sequence[int] | None = None,
) -> int:
    """Returns the bytes that the features of a prepared dataset will take; arguments as in [`write_feature_cache`]."""
    config = target_config.get_text_config(decoder=True)
    if target_layer_ids is not None:
        target_layer_ids = resolve_layer_ids(target_config, target_layer_ids)
    token_bytes = state_width(config) * dtype.itemsize * (1 + len(kept_layers(target_layer_ids, target_config)))
    return sum(_row_lengths(dataset)) * (token_bytes + 4 * len(_columns(dataset)))


def write_feature_cache(
    dataset: Dataset,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    batch_size: int = 4,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    target_layer_ids: Sequence[int] | None = None,
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
        batch_size: Rows that the target reads at a time.
        shard_bytes: Size of a shard, at most; a shard has at least one row.
        target_layer_ids: Layers whose states are written next to the last ones, as in [`GumihoConfig`]. Drafters
            without `target_layer_ids` can be trained on such a cache, too.

    Raises:
        ValueError: The folder holds a cache of something else, the target does not have these layers, or the features
            do not fit into `dtype`.
        OSError: The disk is too small or full, or another run writes there. What is written stays.
    """
    folder, state = Path(folder), PartialState()
    folder.mkdir(parents=True, exist_ok=True)
    if target_layer_ids is not None:
        target_layer_ids = resolve_layer_ids(target.config, target_layer_ids)
    features = OnlineFeatures(target, target_layer_ids)
    if "loss_mask" not in dataset.column_names and "loss_mask" in _columns(dataset):
        dataset = dataset.map(lambda row: {"loss_mask": loss_mask_of(row).tolist()})
    manifest = _make_manifest(dataset, target, tokenizer, dtype, shard_bytes, target_layer_ids)
    with sole_writer(folder) if state.is_main_process else nullcontext():
        manifest = _begin(dataset, target, tokenizer, folder, manifest)
        # Each process has its shards whatever the others have written meanwhile.
        mine = range(state.process_index, manifest.num_shards, state.num_processes)
        columns, seed = [*manifest.columns, *manifest.feature_columns], manifest.checksum_seed
        missing = [i for i in mine if not is_intact(shard_path(folder, i), columns, seed, len(manifest.rows_of(i)))]
        lengths = _row_lengths(dataset)
        total = sum(lengths[row] for index in missing for row in manifest.rows_of(index))
        quiet = not (missing and state.is_local_main_process)
        with tqdm(desc="extracting features", total=total, unit="token", unit_scale=True, disable=quiet) as progress:
            for index in missing:
                rows = _extract(dataset, manifest.rows_of(index), features, manifest, batch_size, progress)
                save_completely(make_shard(rows, seed), shard_path(folder, index))
        state.wait_for_everyone()


def _begin(
    dataset: Dataset,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    manifest: CacheManifest,
) -> CacheManifest:
    """Writes everything but the shards, in one of the processes; returns the manifest that is found or written."""
    try:
        found = CacheManifest.load(folder)
    except (FileNotFoundError, ValueError):  # it is missing or damaged, and has to be written anew
        found = manifest
    found.check(manifest.made_from, folder, "Extract features into another folder, or delete this one.")
    state = PartialState()
    state.wait_for_everyone()
    if state.is_main_process:
        dtype = getattr(torch, found.dtype)
        _check_space(folder, found, cache_size(dataset, target.config, dtype, found.target_layer_ids))
        for path in folder.glob("*.partial"):
            path.unlink()
        _write_target(target, tokenizer, folder, found)
    state.wait_for_everyone()
    return found


def _write_target(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, manifest: CacheManifest
) -> None:
    """Writes what a cache knows of its target, and the manifest at last, where these are not there or damaged."""
    target_folder, embedding = folder / TARGET_FOLDER, target.get_input_embeddings().weight
    weights = {"embed_tokens.weight": fitting_rows(embedding, *embedding.shape)} | _head_weights(target)
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in sorted(weights.items())}
    manifest = replace(manifest, weights_checksum=checksum(weights.values(), 0))
    try:
        load_weights(target_folder / WEIGHTS, manifest.weights_checksum)
        if CacheManifest.load(folder) == manifest:
            return
    except (FileNotFoundError, ValueError):
        pass
    target.config.save_pretrained(target_folder)
    tokenizer.save_pretrained(target_folder)
    save_completely(weights, target_folder / WEIGHTS)
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(json.dumps(asdict(manifest), indent=2), encoding="utf-8")
    os.replace(partial, folder / MANIFEST)


def _columns(dataset: Dataset) -> list[str]:
    found = set(dataset.column_names) | ({"loss_mask"} if {*OTHER_MARKS} & set(dataset.column_names) else set())
    return [name for name in ("input_ids", "loss_mask", "position_ids") if name in found]


def _row_lengths(dataset: Dataset) -> list[int]:
    return [len(row["input_ids"]) for row in dataset.select_columns("input_ids").with_format("numpy")]


def _make_manifest(
    dataset: Dataset,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    shard_bytes: int,
    layer_ids: Sequence[int] | None,
) -> CacheManifest:
    lengths, columns = _row_lengths(dataset), _columns(dataset)
    row_bytes = cache_size(dataset, target.config, dtype, layer_ids) / sum(lengths) * max(lengths)
    data = rows_fingerprint(dataset.select_columns(columns).with_format("numpy"), columns)
    fingerprints = {"target": model_fingerprint(target), "data": data} | tokenizer_fingerprints(tokenizer)
    layers = {} if layer_ids is None else {"layers": ",".join(map(str, layer_ids))}
    made_from = json.dumps(fingerprints | layers | {"dtype": str(dtype)}, sort_keys=True)
    return CacheManifest(
        fingerprints=fingerprints,
        columns=columns,
        dtype=str(dtype).removeprefix("torch."),
        target_name=target.config.name_or_path,
        num_rows=len(lengths),
        num_tokens=sum(lengths),
        rows_per_shard=max(int(shard_bytes // row_bytes), 1),
        target_layer_ids=None if layer_ids is None else list(layer_ids),
        checksum_seed=zlib.crc32(made_from.encode()),
    )


def _check_space(folder: Path, manifest: CacheManifest, total: int) -> None:
    """Raises `OSError` where the shards that are missing will not fit on the disk."""
    done = sum(shard_path(folder, index).exists() for index in range(manifest.num_shards))
    needed = total * (manifest.num_shards - done) // manifest.num_shards
    free = shutil.disk_usage(folder).free
    if needed > free:
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
        bias = {} if head.bias is None else {"lm_head.bias": head.bias}
        return {"lm_head.weight": head.weight, **bias}
    embedding = target.get_input_embeddings().weight
    width = getattr(head, "in_features", embedding.shape[1])
    probe = torch.eye(width, dtype=target.dtype, device=input_device(target))
    bias = head(torch.zeros_like(probe[:1]))[0]
    return {"lm_head.weight": (head(probe) - bias).T, "lm_head.bias": bias}


def _extract(
    dataset: Dataset, rows: range, features: OnlineFeatures, manifest: CacheManifest, batch_size: int, progress: tqdm
) -> list[dict[str, torch.Tensor]]:
    """Returns the rows of a shard."""
    collate, extracted = GumihoDataCollator(), []
    device, dtype = input_device(features.target), getattr(torch, manifest.dtype)
    for start in range(rows.start, rows.stop, batch_size):
        chosen = [dataset[index] for index in range(start, min(start + batch_size, rows.stop))]
        states = features.states({name: tensor.to(device) for name, tensor in collate(chosen).items()})
        found = {"hidden_states": stored_states(states.last, dtype)}
        if features.layer_ids is not None:
            width = len(kept_layers(features.layer_ids, features.config)) * states.last.shape[-1]
            found["layer_states"] = stored_states(states.target_states[..., :width], dtype)
        for index, row in enumerate(chosen):
            length = len(row["input_ids"])
            tokens = {name: torch.tensor(row[name], dtype=torch.int32, device="cpu") for name in manifest.columns}
            extracted.append(tokens | {name: values[index, :length] for name, values in found.items()})
            progress.update(length)
    return extracted


def save_completely(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes a file completely or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise UserOSError(
            f"Could not write {str(path)!r}: {error}. The shards before it are complete. {way_out(error)}."
        ) from error
