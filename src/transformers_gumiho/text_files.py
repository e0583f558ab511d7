"""Reading files of users: texts of any origin, and the rows of datasets. Errors name the file and the line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .user_errors import UserFileNotFoundError, UserValueError, as_user_errors


if TYPE_CHECKING:
    from datasets import Dataset

# The column under which the lines of a JSONL file travel until they are parsed: a broken one costs only itself.
JSON_LINE = "json_line"
# Who reads a file. JSON may begin with a mark of its encoding; bytes that are no UTF-8 become escapes that it lacks.
_LINES: dict[str, Any] = {"path": "text", "encoding": "utf-8-sig", "encoding_errors": "backslashreplace"}
_READERS: dict[str, dict[str, Any]] = {".jsonl": _LINES, ".json": {"path": "json"}, ".parquet": {"path": "parquet"}}


class MalformedRowError(UserValueError):
    """A row that cannot be used; its message is the reason it is counted under."""


def read_text(path: str | Path) -> str:
    """
    Returns the text of a UTF-8 file, without a byte order mark.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ValueError: The file has another encoding.
    """
    if not Path(path).exists():
        raise UserFileNotFoundError(f"There is no file {str(path)!r}. Give an existing one.")
    with as_user_errors():
        data = Path(path).read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserValueError(
            f"{str(path)!r} is not UTF-8 in line {line}: {error.reason}. Save it as UTF-8."
        ) from error


def read_json_lines(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """
    Returns the rows of a JSONL file, each with the number of its line. Blank lines are skipped.

    Raises:
        ValueError: A line is not a JSON object, or the file is not UTF-8.
    """
    rows: list[tuple[int, dict[str, Any]]] = []
    # Not `splitlines`, which also splits at characters that JSON strings may hold (U+2028).
    for number, line in enumerate(read_text(path).split("\n"), 1):
        try:
            rows += [(number, parse_row({JSON_LINE: line}))] if line.strip() else []
        except MalformedRowError as error:
            raise UserValueError(
                f"{str(path)!r} {error} in line {number}. Each line must be a JSON object, such as "
                f'{{"prompt": "..."}}.'
            ) from error
    return rows


def load_conversations(name: str, split: str | None = "train", **kwargs: Any) -> "Dataset":
    """
    Loads a dataset. Lines of JSONL files are one column, for [`parse_row`].

    Args:
        name: A local `.jsonl`, `.json` or `.parquet` file, a folder (saved by `datasets` or of data files), or the
            name of a dataset on the Hub, which may end in `:config` or `:config:split`.
        split: The split to load, where the name has none; `None` for `test`, or else the first. The only split of a
            file is `train`.
        **kwargs: For `datasets.load_dataset`.

    Raises:
        FileNotFoundError: `name` looks like a file, and there is none.
        ValueError: There is no such split, or the file is empty or cannot be read.
    """
    # Imported here, because only datasets need the library.
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.data_files import DataFilesDict, get_data_patterns
    from datasets.exceptions import DatasetGenerationError

    path, named_split = Path(name), ""
    is_saved = any((path / file).exists() for file in ("dataset_info.json", "dataset_dict.json"))
    if path.suffix in _READERS:
        if not path.is_file():
            raise UserFileNotFoundError(
                f"There is no file {name!r}. Give an existing file, a folder, or a name on the Hub."
            )
        if not path.stat().st_size:
            raise UserValueError(f"{name!r} is empty.")
        reader = _READERS[path.suffix] | {"data_files": {"train": [name]}}
    elif path.is_dir() and not is_saved and any(path.rglob("*.jsonl")):
        files = DataFilesDict.from_patterns(get_data_patterns(name), base_path=name, allowed_extensions=[".jsonl"])
        reader = _LINES | {"data_files": files}
    else:
        source, config, named_split = [*([name] if path.is_dir() else name.split(":")), "", ""][:3]
        reader = {"path": source, "name": config or None}
    split = named_split or split
    try:
        with as_user_errors():
            rows = load_from_disk(name) if is_saved else load_dataset(**reader | kwargs, split=split)
    except DatasetGenerationError as error:
        raise UserValueError(f"{name!r} cannot be read: {error.__cause__}. Repair or replace the file.") from error
    if is_saved or split is None:
        splits = rows if isinstance(rows, DatasetDict) else DatasetDict(train=rows)
        split = split or ("test" if "test" in splits else next(iter(splits)))
        if split not in splits:
            raise UserValueError(f"{name!r} has no split {split!r}. Choose from {', '.join(splits)}.")
        rows = splits[split]
    return rows.rename_column("text", JSON_LINE) if reader["path"] == "text" else rows


def parse_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row without its empty columns; raises `MalformedRowError` for a line that is not a JSON object."""
    if JSON_LINE in row:
        try:
            row = json.loads(row[JSON_LINE])
        except ValueError:
            raise MalformedRowError("is not JSON, or not UTF-8") from None
        if not isinstance(row, dict):
            raise MalformedRowError("is not a JSON object")
    return _without_none(row)


def _without_none(value: Any) -> Any:
    """Returns a value without empty fields, which tables fill in wherever another row has something."""
    if isinstance(value, Mapping):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value
