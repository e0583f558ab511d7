"""The files of a feature cache: rows with checksums, and the error of a damaged file."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ..user_errors import UserValueError


def shard_path(folder: Path, index: int) -> Path:
    """Returns where a shard is."""
    return folder / f"shard-{index:05d}.safetensors"


def damaged(path: Path, error: Exception) -> ValueError:
    """Returns the error of a damaged file of a cache."""
    return UserValueError(f"{str(path)!r} is damaged: {error}. Run what wrote it again, which writes this file anew.")


def checksum(tensors: Iterable[torch.Tensor], seed: int) -> int:
    """Returns a checksum of these tensors, in their order."""
    for tensor in tensors:
        seed = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, seed)
    return seed


def make_shard(rows: Sequence[Mapping[str, torch.Tensor]], seed: int) -> dict[str, torch.Tensor]:
    """Returns the tensors of a shard of rows: the values of all in one piece, where each begins, and its checksum."""
    offsets = torch.tensor([0, *(len(row["input_ids"]) for row in rows)], device="cpu").cumsum(0)
    sums = [_row_checksum(row, number, seed) for number, row in enumerate(rows)]
    columns = {name: torch.cat([row[name] for row in rows]) for name in (rows[0] if rows else ())}
    return {"offsets": offsets, "checksums": torch.tensor(sums, dtype=torch.int64, device="cpu"), **columns}


def open_shard(path: Path) -> Any:
    """Opens a shard; raises `ValueError` where it cannot be read."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error


def read_shard_row(file: Any, row: int, columns: list[str], seed: int | None = None) -> dict[str, torch.Tensor]:
    """Reads columns of a row. With the `seed` of its shard, all columns: raises `ValueError` if they have changed."""
    start, stop = file.get_slice("offsets")[row : row + 2].tolist()
    found = {name: file.get_slice(name)[start:stop] for name in columns}
    if seed is not None and _row_checksum(found, row, seed) != int(file.get_slice("checksums")[row : row + 1]):
        raise UserValueError(f"row {row} of it has another checksum")
    return found


def _row_checksum(columns: Mapping[str, torch.Tensor], number: int, seed: int) -> int:
    # Not 0 for a row of no tokens: that is what is read where everything is zero.
    return checksum(columns.values(), seed + number + 1)


def is_intact(path: Path, columns: list[str], seed: int, num_rows: int) -> bool:
    """Whether a shard is there with its rows as they were written."""
    if not path.exists():
        return False
    try:
        file = open_shard(path)
        for row in range(num_rows):
            read_shard_row(file, row, columns, seed)
        return int(file.get_slice("offsets").get_shape()[0]) == num_rows + 1
    except (ValueError, SafetensorError):
        return False


def load_weights(path: Path, expected: int | None) -> dict[str, torch.Tensor]:
    """Reads the target's weights; raises `ValueError` where they are not those of the `expected` checksum."""
    try:
        weights = load_file(path)
        if checksum((weights[name] for name in sorted(weights)), 0) != expected:
            raise UserValueError("it has another checksum")
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path, error) from error
    return weights
