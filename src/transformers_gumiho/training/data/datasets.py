"""Data sets of users: files of rows in any format, and what a line of them holds."""

import errno
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...commands import UserFileNotFoundError, UserOSError, UserValueError, as_user_errors, says_full
from ...files import is_path, read_text
from .manifest import MADE_FROM


if TYPE_CHECKING:
    from datasets import Dataset

# The column under which the lines of a JSONL file travel until they are parsed: a broken one costs only itself.
JSON_LINE = "json_line"
# The columns of a question and its answer, as TRL, Alpaca, Dolly and others name them, and of an instruction's input.
_QUESTIONS = ("prompt", "instruction", "question", "query")
_ANSWERS = ("completion", "output", "response", "answer")
_INPUTS = ("input", "context")
# Who reads a file. JSON may begin with a mark of its encoding; bytes that are no UTF-8 become escapes that it lacks.
_LINES: dict[str, Any] = {"path": "text", "encoding": "utf-8-sig", "encoding_errors": "backslashreplace"}
_READERS: dict[str, dict[str, Any]] = {".jsonl": _LINES}
_READERS |= {f".{kind}": {"path": kind} for kind in ("json", "parquet")}
# Texts of a table stay as they are, such as `None`, `NA` and `007`. An empty field holds nothing.
_TEXTS = dict.fromkeys((*_QUESTIONS, *_ANSWERS, *_INPUTS, "text", "system", "system_prompt"), str)
_READERS[".csv"] = {"path": "csv", "keep_default_na": False, "na_values": [""], "converters": _TEXTS}


class MalformedRowError(UserValueError):
    """A row that cannot be used; its message is the reason it is counted under."""


def load_conversations(name: str, split: str | None = "train", **kwargs: Any) -> "Dataset":
    """
    Loads a dataset. Lines of JSONL files are one column, for [`parse_row`].

    Args:
        name: A local `.jsonl`, `.json`, `.parquet` or `.csv` file (also as `.gz`), a folder (saved by `datasets` or of
            data files), or the name of a dataset on the Hub, which may end in `:config` or `:config:split`.
        split: The split to load, where the name has none; `None` for `test`, or else the first. The only split of a
            file is `train`.
        **kwargs: For `datasets.load_dataset`.

    Raises:
        FileNotFoundError: `name` looks like a file, and there is none.
        ValueError: There is no such split, or the file is empty, of another kind or cannot be read.
    """
    # Imported here, because only datasets need the library.
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetGenerationError

    path, named_split = Path(name), ""
    is_saved = any((path / file).exists() for file in ("state.json", "dataset_dict.json"))
    kind, files = _kind_of(name), {"train": [escape(name)]}
    if (kind or is_path(name)) and not path.exists() and not Path(name.partition(":")[0]).is_dir():
        raise UserFileNotFoundError(
            f"There is no file {name!r}. Give an existing file, a folder, or a name on the Hub."
        )
    if path.is_file() and not kind:
        raise UserValueError(f"{name!r} is none of {', '.join(_READERS)}. Convert it, or give another file.")
    if path.is_file() and not path.stat().st_size:
        raise UserValueError(f"{name!r} is empty.")
    if path.is_dir():
        kind, files = ("", {}) if is_saved or _is_described(path) else _data_files(name)
    if kind:
        reader = _READERS[kind] | {"data_files": files, "name": _version_of(files)}
    else:
        source, config, named_split = [*([name] if path.is_dir() else name.split(":")), "", ""][:3]
        reader = {"path": source, "name": config or None}
    split = named_split or split
    try:
        with as_user_errors(), full_cache_named():
            rows = load_from_disk(name) if is_saved else load_dataset(**reader | kwargs, split=split)
    except (OSError, ModuleNotFoundError):
        raise
    except DatasetGenerationError as error:
        raise UserValueError(f"{name!r} cannot be read: {error.__cause__}. Repair or replace the file.") from error
    except Exception as error:  # whatever the library makes of a damaged file
        raise UserValueError(f"{name!r} cannot be read: {error}") from error
    if is_saved or split is None:
        splits = rows if isinstance(rows, DatasetDict) else DatasetDict(train=rows)
        split = split or ("test" if "test" in splits else next(iter(splits)))
        if split not in splits:
            raise UserValueError(f"{name!r} has no split {split!r}. Choose from {', '.join(splits)}.")
        rows = splits[split]
    return rows.rename_column("text", JSON_LINE) if reader["path"] == "text" else rows


@contextmanager
def full_cache_named() -> Iterator[None]:
    """Raises `OSError` where the disk of the cache of `datasets` is full, which the library may say of a file."""
    from datasets import config

    try:
        yield
    except Exception as error:
        causes = [cause for cause in (error, error.__cause__) if isinstance(cause, Exception)]
        if not any(map(says_full, causes)):
            raise
        message = "The disk is full on which `datasets` keeps what it reads. Make room, or set HF_DATASETS_CACHE"
        raise UserOSError(errno.ENOSPC, message, str(config.HF_DATASETS_CACHE)) from error


def _version_of(files: Mapping[str, list[str]]) -> str:
    """Returns a name of these files as they are now: the library looks at their times alone, which may be old ones."""
    paths = [Path(path) for part in files.values() for path in (glob(pattern)[0] for pattern in part)]
    found = [(stat.st_size, stat.st_ctime_ns) for stat in (path.stat() for path in paths)]
    return f"version-{hashlib.sha256(str(found).encode()).hexdigest()[:16]}"


def _kind_of(name: str) -> str:
    kind = Path(name.lower().removesuffix(".gz")).suffix
    return kind if kind in _READERS and not name.endswith(MADE_FROM) else ""


def _data_files(folder: str) -> tuple[str, dict[str, list[str]]]:
    """
    Returns the kind of a folder's data files, empty where only the library knows it, and the files of each split.
    Raises `ValueError` for several kinds, of which the library would read one.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    with as_user_errors():
        found = DataFilesDict.from_patterns(get_data_patterns(escape(folder)), base_path=escape(folder))
    kinds = sorted({_kind_of(path) for paths in found.values() for path in paths} - {""})
    if len(kinds) > 1:
        raise UserValueError(
            f"{folder!r} holds data files of several kinds: {', '.join(kinds)}. Name a file, or a folder of one kind."
        )
    kind = kinds[0] if kinds else ""
    files = {split: [escape(path) for path in paths if _kind_of(path)] for split, paths in found.items()}
    return kind, {split: paths for split, paths in files.items() if paths}


def _is_described(folder: Path) -> bool:
    """Whether a data set's card says which files are its splits and configs, as in repositories of the Hub."""
    card = folder / "README.md"
    return card.is_file() and re.search("^configs:", read_text(card), re.MULTILINE) is not None


def parse_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row without its empty columns; raises `MalformedRowError` for a line that is not a JSON object."""
    if JSON_LINE not in row:
        return _without_none(row)
    try:
        line, row = row[JSON_LINE], json.loads(row[JSON_LINE])
        if "\\u" in line:  # an escape may be half a character, which no tokenizer reads
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise MalformedRowError("is not JSON, or not UTF-8") from None
    if not isinstance(row, dict):
        raise MalformedRowError("is not a JSON object")
    return {name: value for name, value in row.items() if value is not None}


def read_pair(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """
    Returns the prompt of a row and its completion, each `None` where it has none. In rows of Alpaca and Dolly, the
    prompt is the instruction and, after an empty line, its input.
    """
    prompt = next((row[name] for name in _QUESTIONS if name in row), None)
    completion = next((row[name] for name in _ANSWERS if name in row), None)
    given = next((row[name] for name in _INPUTS if row.get(name)), None)
    if given and "prompt" not in row and "instruction" in row:
        prompt = f"{prompt}\n\n{given}"
    return prompt, completion


def _without_none(value: Any) -> Any:
    """Returns a value without empty fields, which tables fill in wherever another row has something."""
    if isinstance(value, Mapping):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value
