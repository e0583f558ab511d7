"""Files that users name: models on this machine, and texts. Errors name the file and what is wrong with it."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from .commands import UserError, UserFileNotFoundError, UserOSError, UserValueError, as_user_errors


# The arguments of `from_pretrained` that say where files are.
PLACES = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
_ALL = "*"  # a pattern
# What models and tokenizers are loaded from, beside weights, by the end of the name: a JSON object each.
_OBJECTS = ("config.json", "index.json", "tokenizer.json", "added_tokens.json", "special_tokens_map.json")


@contextmanager
def damaged_files_named(
    name_or_path: Any, options: Mapping[str, Any] | None = None, names: str = _ALL
) -> Iterator[None]:
    """
    Raises [`UserOSError`] where something fails within this, and a file of the model is damaged: libraries take
    whatever they find for what they expect. So it does for a name that is no folder, and that the Hub does not have,
    unless `names`, a pattern, asks for some files alone. `options` are the arguments of `from_pretrained`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        check_files(name_or_path, options or {}, names, error)
        if isinstance(error, OSError) and names == _ALL and not os.path.exists(str(name_or_path)):
            said = " ".join(str(error).split())
            raise UserOSError(f"There is no folder {str(name_or_path)!r}, and the Hub gave none: {said}") from error
        raise


def check_files(
    name_or_path: Any, options: Mapping[str, Any], names: str = _ALL, cause: Exception | None = None
) -> None:
    """Raises [`UserOSError`] for the first file of a model, on this machine, that is damaged."""
    place = Path(str(name_or_path), options.get("subfolder") or "")
    try:
        if not place.exists():
            places = {name: options[name] for name in PLACES if options.get(name) is not None}
            found = cached_file(str(name_or_path), "config.json", **places | {"local_files_only": True})
            place = Path(str(found)).parent
        paths = [place] if place.is_file() else sorted(path for path in place.glob(names) if path.is_file())
    except OSError:  # it is not here
        return
    for path in paths:
        if path.name.startswith("."):  # of an editor, or of another system
            continue
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):
                    continue
            if not path.name.endswith(_OBJECTS) or isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
                continue
            finding = "it holds no JSON object"
        except ValueError as error:  # no JSON, or not UTF-8
            finding = f"it holds no JSON object ({error})"
        except SafetensorError as error:
            finding = str(error)
        except OSError:  # it cannot be read, which is another failure
            continue
        raise UserOSError(
            f"`{path.name}` of {str(name_or_path)!r} is damaged: {finding}. An interrupted download or copy leaves "
            f"such a file. Delete it, and download it again (`force_download=True`) or repeat what wrote it."
        ) from cause


def check_folder(name: str, has_config: bool = True) -> None:
    """Raises `FileNotFoundError` for a path that is no model's folder. Names on the Hub, of one slash, pass."""
    if os.path.isfile(name):
        raise UserFileNotFoundError(f"{name!r} is a file. Give a model's folder.")
    if is_path(name) and not os.path.isdir(name):
        raise UserFileNotFoundError(
            f"There is no folder {name!r}. Give an existing folder, or a name on the Hub such as "
            f"'amd/Gumiho-llama3-8b'."
        )
    configs = ("config.json", "adapter_config.json")
    if has_config and os.path.isdir(name) and not any(Path(name, config).is_file() for config in configs):
        raise UserFileNotFoundError(f"{name!r} has no config.json, so it holds no model. Give a model's folder.")


def check_is_no_snapshot(folder: str | os.PathLike) -> None:
    """Raises `OSError` for a folder of links to files elsewhere, which writing into it would change."""
    links = [path.name for path in Path(folder).glob("*") if path.is_symlink()]
    if links:
        raise UserOSError(
            f"{str(folder)!r} holds links to files that are kept elsewhere, such as {links[0]!r}, as folders in the "
            f"cache of the Hub do. Writing there would change those. Name another folder (in commands: --output_dir)."
        )


def is_path(name: str) -> bool:
    """Whether a name is none on the Hub."""
    return name.count("/") > 1 or name.startswith((".", "/", "~")) or name.endswith("/")


def read_text(path: str | Path) -> str:
    """
    Returns the text of a UTF-8 file, without a byte order mark.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ValueError: The file has another encoding.
    """
    with as_user_errors():  # a text in place of a file is a name that is too long
        if not Path(path).exists() or Path(path).is_dir():
            raise UserFileNotFoundError(f"There is no file {str(path)!r}. Give an existing one.")
        data = Path(path).read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserValueError(
            f"{str(path)!r} is not UTF-8 in line {line}: {error.reason}. Save it as UTF-8."
        ) from error
