"""Writing a feature cache: shards are only ever added."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..commands import UserOSError
from ..generation.verification.traits import input_device
from ..model.token_embedding import fitting_rows
from .data.run_files import way_out
from .feature_cache import LENGTHS, NUMBERS, TARGET_FOLDER, WEIGHTS, checksum, open_file, rows_of, shards_of


Row = Mapping[str, torch.Tensor]


class CacheWriter:
    """
    Adds shards to a cache, under names that no other process gives.

    Args:
        folder: The cache.
        process_index: The process, of several that write at once.
    """

    def __init__(self, folder: Path, process_index: int = 0):
        self._prefix = f"{folder}/shard-{process_index:03d}-"
        before = [path.stem.rpartition("-")[2] for path in shards_of(folder) if str(path).startswith(self._prefix)]
        self._next = max(map(int, before), default=-1) + 1

    def save(self, rows: Mapping[int, Row]) -> Path:
        """Writes a shard of rows, given by their numbers; raises `OSError` where it cannot be written."""
        path = Path(f"{self._prefix}{self._next:05d}.safetensors")
        lengths = [len(row["input_ids"]) for row in rows.values()]
        places = {NUMBERS: torch.tensor([*rows], device="cpu"), LENGTHS: torch.tensor(lengths, device="cpu")}
        names = next(iter(rows.values()))
        _save(places | {name: torch.cat([row[name] for row in rows.values()]) for name in names}, path)
        self._next += 1
        return path


def missing_rows(folder: Path, lengths: Sequence[int]) -> list[int]:
    """Returns the numbers of the rows, of these lengths, that no shard of a cache holds."""
    there = {number for path in shards_of(folder) for number in rows_of(path)[0].tolist()}
    return [number for number in range(len(lengths)) if number not in there]


def delete_unfit(folder: Path, lengths: Sequence[int] | None = None) -> None:
    """Deletes files of a cache that were cut, and shards of rows that have other lengths than these."""
    for path in folder.glob("**/*.partial"):
        path.unlink()
    for path in shards_of(folder):
        fits = False
        with suppress(ValueError):
            rows = zip(*(tensor.tolist() for tensor in rows_of(path)), strict=True)
            fits = lengths is None or all(n < len(lengths) and lengths[n] == length for n, length in rows)
        if not fits:
            path.unlink()


def write_target(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes what a cache knows of its target, where that is not there, or was cut."""
    with suppress(ValueError):
        open_file(folder / TARGET_FOLDER / WEIGHTS)
        return
    embedding = target.get_input_embeddings().weight
    weights = {"embed_tokens.weight": fitting_rows(embedding, *embedding.shape)} | _head_weights(target)
    for part in (target.config, tokenizer):
        part.save_pretrained(folder / TARGET_FOLDER)
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    _save(weights, folder / TARGET_FOLDER / WEIGHTS)


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


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes a file with its checksum, or none; raises `OSError` where the disk is full."""
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial, {"checksum": checksum(tensors)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise UserOSError(
            f"Could not write {str(path)!r}: {error}. The shards before it are complete. {way_out(error)}."
        ) from error
