"""Errors that name the damaged file of a checkpoint, as an interrupted download leaves it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from ..user_errors import UserOSError


class DamagedFileError(UserOSError):
    """A file is there, and does not hold what a file of its name holds."""

    def __init__(self, file: str, name_or_path: Any, finding: str):
        super().__init__(
            f"`{file}` of {str(name_or_path)!r} is damaged: {finding}. An interrupted download or copy leaves such a "
            f"file. Delete it, and download it again (`force_download=True`) or save it again."
        )


@contextmanager
def damaged_json_named(file: str, name_or_path: Any) -> Iterator[None]:
    """Raises [`DamagedFileError`] where transformers reads, within this, a JSON file that holds no object."""
    try:
        yield
    except (AttributeError, TypeError) as error:  # it takes whatever JSON it finds for an object
        raise DamagedFileError(file, name_or_path, f"it holds no JSON object ({error})") from error
    except OSError as error:
        # It raises the same where there is no file.
        if not isinstance(error.__context__, (json.JSONDecodeError, UnicodeDecodeError)):
            raise
        raise DamagedFileError(file, name_or_path, f"it holds no JSON object ({error.__context__})") from error


@contextmanager
def damaged_weights_named(name_or_path: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """
    Raises [`DamagedFileError`] where a safetensors file that is read within this is truncated or damaged. `kwargs` are
    the arguments of `from_pretrained`.
    """
    try:
        yield
    except SafetensorError as error:
        for file in _weight_files(name_or_path, kwargs):
            try:
                with safe_open(file, framework="pt"):
                    pass
            except SafetensorError as finding:
                raise DamagedFileError(file.name, name_or_path, str(finding)) from error
        raise


def _weight_files(name_or_path: Any, kwargs: dict[str, Any]) -> list[Path]:
    """Returns the safetensors files of a checkpoint in a folder, or in the cache of the Hub."""
    subfolder = kwargs.get("subfolder") or ""
    if os.path.isdir(name_or_path):
        return sorted(Path(name_or_path, subfolder).glob("*.safetensors"))
    for name in ("model.safetensors", "model.safetensors.index.json"):
        cached = try_to_load_from_cache(
            str(name_or_path),
            os.path.join(subfolder, name),
            cache_dir=kwargs.get("cache_dir"),
            revision=kwargs.get("revision"),
        )
        if isinstance(cached, str):
            return sorted(Path(cached).parent.glob("*.safetensors"))
    return []
