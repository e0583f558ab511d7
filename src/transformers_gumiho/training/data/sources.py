"""Where datasets are loaded from."""

from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.data_files import DataFilesDict, get_data_patterns
from datasets.exceptions import DatasetGenerationError

from ...user_errors import UserFileNotFoundError, UserValueError, as_user_errors


# The column under which the lines of a JSONL file travel until they are parsed: a broken one costs only itself.
JSON_LINE = "json_line"
_BUILDERS = {".jsonl": "text", ".json": "json", ".parquet": "parquet"}


def load_conversations(name: str, split: str = "train", **kwargs: Any) -> Dataset:
    """
    Loads a dataset.

    Args:
        name: A local `.jsonl`, `.json` or `.parquet` file, a folder (saved by `datasets` or of data files), or the
            name of a dataset on the Hub, which may end in `:config` or `:config:split`.
        split: The split to load, where the name has none. The only split of a file is `train`.
        **kwargs: For `datasets.load_dataset`.

    Raises:
        FileNotFoundError: `name` looks like a file, and there is none.
        ValueError: There is no such split, or the file is empty or cannot be read.
    """
    path = Path(name)
    if path.suffix in _BUILDERS:
        if not path.is_file():
            raise UserFileNotFoundError(
                f"There is no file {name!r}. Give an existing file, a folder, or a name on the Hub."
            )
        return _load_files(name, _BUILDERS[path.suffix], {"train": [name]}, split, **kwargs)
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            with as_user_errors():
                saved = load_from_disk(name)
            splits = saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)
            if split not in splits:
                raise UserValueError(f"{name!r} has no split {split!r}. Choose from {', '.join(splits)}.")
            return splits[split]
        if any(path.rglob("*.jsonl")):
            patterns = get_data_patterns(name)
            files = DataFilesDict.from_patterns(patterns, base_path=name, allowed_extensions=[".jsonl"])
            return _load_files(name, "text", files, split, **kwargs)
    source, config, named_split = [*([name] if path.is_dir() else name.split(":")), "", ""][:3]
    with as_user_errors():
        return load_dataset(source, config or None, split=named_split or split, **kwargs)


def _load_files(name: str, builder: str, files: dict[str, list[str]], split: str, **kwargs: Any) -> Dataset:
    if not any(Path(file).stat().st_size for paths in files.values() for file in paths):
        raise UserValueError(f"{name!r} is empty.")
    if builder == "text":  # bytes that are no UTF-8 become escapes that JSON has not
        kwargs = {"encoding": "utf-8-sig", "encoding_errors": "backslashreplace"} | kwargs
    try:
        with as_user_errors():
            dataset = load_dataset(builder, data_files=files, split=split, **kwargs)
    except DatasetGenerationError as error:
        raise UserValueError(f"{name!r} cannot be read as {builder}: {error.__cause__}") from error
    return dataset.rename_column("text", JSON_LINE) if builder == "text" else dataset
