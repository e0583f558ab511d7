"""Reading conversations: where they are loaded from, and the forms in which datasets write them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from ..user_errors import UserFileNotFoundError, UserValueError, as_user_errors


# The column under which the lines of a JSONL file travel until they are parsed: a broken one costs only itself.
JSON_LINE = "json_line"

# Who speaks, as datasets write it and as chat templates want it.
_ROLES = {"system": "system", "user": "user", "human": "user", "tool": "tool"}
_ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant")
_PLACEHOLDER = "?"  # for an answer, which the target replaces
_PLACEHOLDER_MESSAGE = {"role": "assistant", "content": _PLACEHOLDER}
FORMATS = "`messages`, `conversations`, `prompt` and `completion`, or `text`"


class MalformedRowError(UserValueError):
    """A row that cannot be read; its message is the reason it is counted under."""


@dataclass(frozen=True)
class Conversation:
    """
    Messages, each a dict of `role` and `content`. A drafter learns the assistant turns from `first_trained` on. If the
    last one was cut at a limit, it has not `ended`, and what the template puts behind it is not learned.
    """

    messages: list[dict[str, str]]
    first_trained: int = 0
    ended: bool = True


@dataclass(frozen=True)
class RawText:
    """Text without a chat template. The drafter learns `completion`; a long one is cut into windows."""

    prompt: str
    completion: str
    ended: bool = True


@dataclass(frozen=True)
class WrittenTokens:
    """
    What a target read and wrote in each turn, as token ids, because the text does not encode back to them. The `text`
    of the last answer shows whose tokens they are.
    """

    turns: list[tuple[list[int], list[int]]]
    text: str


Example = Conversation | RawText | WrittenTokens


def load_conversations(name: str, split: str = "train", **kwargs: Any) -> Dataset:
    """
    Loads a dataset.

    Args:
        name: A local `.jsonl`, `.json` or `.parquet` file, a folder (saved by `datasets` or of data files), or the
            name of a dataset on the Hub.
        split: The split to load.
        **kwargs: For `datasets.load_dataset`.

    Raises:
        FileNotFoundError: `name` looks like a file, and there is none.
        ValueError: The file is empty or cannot be read.
    """
    path = Path(name)
    lines = sorted(map(str, path.glob("*.jsonl"))) if path.is_dir() else [name] if path.suffix == ".jsonl" else []
    other = {".json": "json", ".parquet": "parquet"}.get(path.suffix)
    if (lines == [name] or other) and not path.is_file():
        raise UserFileNotFoundError(
            f"There is no file {name!r}. Give an existing file, a folder, or a name on the Hub."
        )
    if lines and not any(Path(file).stat().st_size for file in lines):
        raise UserValueError(f"{name!r} is empty.")
    if lines:
        # As text, so that a broken line costs only itself: bytes that are no UTF-8 become escapes that JSON has not.
        kwargs = {"encoding": "utf-8-sig", "encoding_errors": "backslashreplace"} | kwargs
        dataset = load_dataset("text", data_files=lines, split="train", **kwargs)
        return dataset.rename_column("text", JSON_LINE)
    if path.is_dir() and (path / "dataset_info.json").exists():
        with as_user_errors():
            return load_from_disk(name)
    if other:
        try:
            return load_dataset(other, data_files=name, split="train", **kwargs)
        except DatasetGenerationError as error:
            raise UserValueError(f"{name!r} is no {path.suffix} file that can be read: {error.__cause__}") from error
    with as_user_errors():
        return load_dataset(name, split=split, **kwargs)


def read_row(row: Mapping[str, Any], has_template: bool) -> Example:
    """
    Reads a row as [`read_text`] does; where a target wrote it and its text does not encode back, the tokens. Raises
    `MalformedRowError` if it has none of the known forms.
    """
    if JSON_LINE in row:
        row = _parse(row[JSON_LINE])
    if row.get("written") is None:
        return read_text(row, has_template)
    try:
        said = row.get("text") or row.get("completion") or row["messages"][-1]["content"]
        turns = [([*map(int, turn["prompt"])], [*map(int, turn["answer"])]) for turn in row["written"]]
    except (KeyError, TypeError, ValueError, IndexError):
        raise MalformedRowError("its `written` tokens are no list of `prompt` and `answer`, with their text") from None
    return WrittenTokens(turns, str(said))


def read_text(row: Mapping[str, Any], has_template: bool, answered: bool = True) -> Conversation | RawText:
    """
    Reads a row in any of the known forms.

    Args:
        row: `messages` (a list of `role` and `content`), `conversations` (of `from` and `value`), `prompt` and
            `completion` (text, or lists of messages), or `text`; or one line of JSON with any of these. Where `ended`
            is false, the last answer was cut at a limit.
        has_template: Whether the target's tokenizer has a chat template; without one a text prompt is taken as it is.
        answered: Whether a question without an answer is malformed. Otherwise a placeholder stands for its answer.

    Raises:
        MalformedRowError: It has none of these forms.
    """
    if JSON_LINE in row:
        row = _parse(row[JSON_LINE])
    if row.get("skipped"):
        raise MalformedRowError(str(row["skipped"]))
    ended, completion = row.get("ended") is not False, row.get("completion")
    if row.get("messages") is not None:
        return Conversation(_read_messages(row["messages"], "role", "content", answered), ended=ended)
    if row.get("conversations") is not None:
        return Conversation(_read_messages(row["conversations"], "from", "value", answered), ended=ended)
    if not answered and completion is None and not row.get("text"):
        completion = _PLACEHOLDER if isinstance(row.get("prompt"), str) else [_PLACEHOLDER_MESSAGE]
    if row.get("prompt") is not None and completion is not None:
        return _read_pair(row["prompt"], completion, has_template, ended)
    if isinstance(row.get("text"), str) and row["text"]:
        return RawText("", row["text"], ended)
    raise MalformedRowError(f"has none of {FORMATS}")


def _parse(line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        raise MalformedRowError("is not JSON, or not UTF-8") from None
    if not isinstance(row, dict):
        raise MalformedRowError("is not a JSON object")
    return row


def _read_messages(turns: Any, role_key: str, content_key: str, answered: bool = True) -> list[dict[str, str]]:
    if not isinstance(turns, list) or not turns:
        raise MalformedRowError("its conversation is not a list of messages, or is empty")
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping) or role_key not in turn or content_key not in turn:
            raise MalformedRowError(f"a message has no `{role_key}` or `{content_key}`")
        role, content = _ROLES.get(str(turn[role_key]).lower()), turn[content_key]
        if role is None:
            raise MalformedRowError(f"unknown role {turn[role_key]!r}")
        if not isinstance(content, str):
            raise MalformedRowError("the content of a message is not text")
        if turn.get("tool_calls"):
            raise MalformedRowError("the assistant calls tools")
        messages.append({"role": role, "content": content})
    if not answered and messages[-1]["role"] != "assistant":
        messages.append(_PLACEHOLDER_MESSAGE)
    if messages[0]["role"] == "assistant":
        raise MalformedRowError("the assistant speaks first")
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if not all(answers) or not answers:
        raise MalformedRowError("the assistant says nothing")
    return messages


def _read_pair(prompt: Any, completion: Any, has_template: bool, ended: bool) -> Conversation | RawText:
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise MalformedRowError("the completion is empty")
        if not has_template:
            return RawText(prompt, completion, ended)
        prompt = [{"role": "user", "content": prompt}]
        completion = [{"role": "assistant", "content": completion}]
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise MalformedRowError("`prompt` and `completion` are neither both text nor both messages")
    messages = _read_messages(prompt + completion, "role", "content")
    if all(message["role"] != "assistant" for message in messages[len(prompt) :]):
        raise MalformedRowError("the assistant says nothing")
    return Conversation(messages, len(prompt), ended)
