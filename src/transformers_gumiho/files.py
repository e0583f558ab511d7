"""Files of users, whose errors name the file and the line, and files that a stopped run can continue."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from .commands import UserError, UserFileNotFoundError, UserOSError, UserValueError, as_user_errors, says_full


if TYPE_CHECKING:
    from datasets import Dataset

# The column under which the lines of a JSONL file travel until they are parsed: a broken one costs only itself.
JSON_LINE = "json_line"
# Who reads a file. JSON may begin with a mark of its encoding; bytes that are no UTF-8 become escapes that it lacks.
_LINES: dict[str, Any] = {"path": "text", "encoding": "utf-8-sig", "encoding_errors": "backslashreplace"}
_READERS: dict[str, dict[str, Any]] = {".jsonl": _LINES}
_READERS |= {f".{kind}": {"path": kind} for kind in ("json", "parquet")}
# Texts of a table stay as they are, such as `None`, `NA` and `007`. An empty field holds nothing.
_TEXTS = dict.fromkeys(("prompt", "completion", "text", "system", "system_prompt"), str)
_READERS[".csv"] = {"path": "csv", "keep_default_na": False, "na_values": [""], "converters": _TEXTS}


# The arguments of `from_pretrained` that say where files are.
PLACES = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
_BESIDE = ".settings.json"  # ends the name of the file with what another one was made from
# What models and tokenizers are loaded from, beside weights, by the end of the name: a JSON object each.
_OBJECTS = ("config.json", "index.json", "tokenizer.json", "added_tokens.json", "special_tokens_map.json")


class MalformedRowError(UserValueError):
    """A row that cannot be used; its message is the reason it is counted under."""


@contextmanager
def damaged_files_named(
    name_or_path: Any, options: Mapping[str, Any] | None = None, names: str = "*"
) -> Iterator[None]:
    """
    Raises [`UserOSError`] where something fails within this, and a file of the model is damaged: libraries take
    whatever they find for what they expect. `options` are the arguments of `from_pretrained`, `names` a pattern.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        check_files(name_or_path, options or {}, names, error)
        raise


def check_files(
    name_or_path: Any, options: Mapping[str, Any], names: str = "*", cause: Exception | None = None
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
    if _is_path(name) and not os.path.isdir(name):
        raise UserFileNotFoundError(
            f"There is no folder {name!r}. Give an existing folder, or a name on the Hub such as "
            f"'amd/Gumiho-llama3-8b'."
        )
    configs = ("config.json", "adapter_config.json")
    if has_config and os.path.isdir(name) and not any(Path(name, config).is_file() for config in configs):
        raise UserFileNotFoundError(f"{name!r} has no config.json, so it holds no model. Give a model's folder.")


def _is_path(name: str) -> bool:
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
    if (kind or _is_path(name)) and not path.exists() and not Path(name.partition(":")[0]).is_dir():
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
        reader = _READERS[kind] | {"data_files": files}
    else:
        source, config, named_split = [*([name] if path.is_dir() else name.split(":")), "", ""][:3]
        reader = {"path": source, "name": config or None}
    split = named_split or split
    try:
        with as_user_errors():
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


def _kind_of(name: str) -> str:
    """Returns which of the `_READERS` reads a file; empty for none."""
    kind = Path(name.lower().removesuffix(".gz")).suffix
    return kind if kind in _READERS and not name.endswith(_BESIDE) else ""


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


def _without_none(value: Any) -> Any:
    """Returns a value without empty fields, which tables fill in wherever another row has something."""
    if isinstance(value, Mapping):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


class Record:
    """
    What a result was made from, in a JSON file next to it, and whether it is finished.

    Args:
        path: The file.

    Attributes:
        made_from: The values by name; empty where nothing is recorded yet.
        is_finished: Whether the result is complete.

    Raises:
        ValueError: The file is damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        self.made_from: dict[str, Any] = {}
        self.is_finished = False
        if not path.exists():
            return
        try:
            found = dict(json.loads(path.read_text(encoding="utf-8")))
            self.made_from, self.is_finished = dict(found["made_from"]), bool(found["is_finished"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserValueError(
                f"{str(path)!r} is damaged. It says what the files next to it were made from. Delete it to continue "
                f"with the current settings; what was made with others stays."
            ) from error

    def check(self, made_from: dict[str, Any], way_out: str) -> None:
        """Raises `ValueError` for values that differ from the recorded ones. A name that the record lacks is new."""
        before, now = self.made_from, json.loads(json.dumps(made_from))  # as it is read again
        changed = [
            f"{name} ({before[name]}, now {now[name]})"
            for name in sorted(now)
            if name in before and before[name] != now[name]
        ]
        if changed:
            name = str(self.path).removesuffix(_BESIDE)
            raise UserValueError(f"{name!r} was created with different settings: {', '.join(changed)}. {way_out}")

    def write(self, made_from: dict[str, Any], is_finished: bool = False) -> None:
        """
        Writes the file completely or not at all.

        Raises:
            OSError: The disk is full.
        """
        self.made_from, self.is_finished = made_from, is_finished
        unfinished = self.path.with_name(self.path.name + ".unfinished")
        with _file_named(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"made_from": made_from, "is_finished": is_finished}, indent=2)
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, self.path)


def check_begun_with(path: Path, settings: dict[str, Any]) -> None:
    """
    Writes the settings of a file next to it, or compares them with those that are there.

    Raises:
        ValueError: The file was begun with other settings, or the file of the settings is damaged.
        OSError: The disk is full. What was written before stays.
    """
    has_rows = path.exists() and path.stat().st_size > 0
    if has_rows and settings_file(path).exists():
        Record(settings_file(path)).check(settings, "Write into another file or delete this one.")
    else:
        settings_file(path).unlink(missing_ok=True)
        Record(settings_file(path)).write(settings)


def settings_file(path: Path) -> Path:
    """Returns the path of the file with the settings of a file."""
    return path.with_name(path.name + _BESIDE)


def complete_lines(path: Path) -> list[bytes]:
    """Returns the lines of a file, without an incomplete last one; none if there is no file."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def cut_incomplete_line(path: Path) -> None:
    """Cuts an incomplete last line off a file, if it exists."""
    if path.exists():
        os.truncate(path, sum(map(len, complete_lines(path))))


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """
    Adds rows to the end of a file. They are written when this returns.

    Raises:
        OSError: The disk is full. What was written before stays.
    """
    with _file_named(path), path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """
    Locks a file or folder for this run, however the run ends. A missing file is created.

    Raises:
        OSError: Another run writes there.
    """
    if fcntl is None:  # Windows has no locks that end with the process without leaving a file
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserOSError(
                error.errno, "Another run is writing there. Wait for it to end, or write elsewhere", str(path)
            ) from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def way_out(error: Exception) -> str:
    """Returns what to do about an error in writing a file."""
    return f"{'Make room' if says_full(error) else 'Remove the cause'} and run this again: it continues here"


@contextmanager
def _file_named(path: Path) -> Iterator[None]:
    """Adds the name of the file, and what to do, to an error in writing it."""
    try:
        yield
    except OSError as error:
        raise UserOSError(
            error.errno,
            f"Could not write {str(path)!r}: {error.strerror}. What was written before stays. {way_out(error)}",
        ) from error
