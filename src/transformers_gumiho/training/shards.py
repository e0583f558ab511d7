"""The files of a feature cache, each written completely or not at all, with a checksum of what it holds."""

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..resumable_file import way_out
from ..user_errors import UserOSError, UserValueError


def shard_path(folder: Path, index: int) -> Path:
    """Returns where a shard is."""
    return folder / f"shard-{index:05d}.safetensors"


def damaged(path: Path, error: object) -> ValueError:
    """Returns the error of a damaged file of a cache."""
    return UserValueError(f"{str(path)!r} is damaged: {error}. Run what wrote it again, which writes this file anew.")


def make_shard(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a shard of rows: the values of all in one piece, and where each begins."""
    offsets = torch.tensor([0, *(len(row["input_ids"]) for row in rows)], device="cpu").cumsum(0)
    return {"offsets": offsets} | {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def save_completely(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes a file; raises `OSError` where the disk is full."""
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial, {"checksum": str(_checksum(tensors))})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise UserOSError(
            f"Could not write {str(path)!r}: {error}. The shards before it are complete. {way_out(error)}."
        ) from error


def open_file(path: Path) -> Any:
    """Opens a file; raises `ValueError` where it is incomplete."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error


def load_checked(path: Path) -> dict[str, torch.Tensor]:
    """Reads all of a file; raises `ValueError` where it is not what was written."""
    file = open_file(path)
    tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    if str(_checksum(tensors)) != (file.metadata() or {}).get("checksum"):
        raise damaged(path, "it has another checksum")
    return tensors


def is_intact(path: Path) -> bool:
    """Whether a file is there as it was written."""
    try:
        load_checked(path)
    except (FileNotFoundError, ValueError):
        return False
    return True


def read_row(file: Any, row: int, columns: list[str]) -> dict[str, torch.Tensor]:
    """Reads columns of a row of an open shard."""
    start, stop = file.get_slice("offsets")[row : row + 2].tolist()
    return {name: file.get_slice(name)[start:stop] for name in columns}


def _checksum(tensors: dict[str, torch.Tensor]) -> int:
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found
