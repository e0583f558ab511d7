"""The forms in which datasets write conversations and texts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from ...commands import UserValueError
from .datasets import MalformedRowError, parse_row, read_pair


# Who speaks, as datasets write it and as chat templates want it.
_ROLES = {"system": "system", "developer": "developer", "user": "user", "human": "user"}
_ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant")
_ROLES |= dict.fromkeys(("tool", "function", "observation", "ipython"), "tool")
# The names that servers, datasets and templates have for what the assistant thinks.
REASONING = ("reasoning_content", "reasoning", "thinking")
_CONVERSATION = ("messages", "conversations", "conversation")
_SYSTEM = ("system", "system_prompt")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # beside the text, which means nothing without them
_TEXT_CHARACTERS = 200  # of a text without a question, the target continues these
_FORMS = "`messages`, `conversations`, `prompt` and `completion`, `instruction` and `output`, or `text`"


@dataclass(frozen=True)
class Example:
    """
    A conversation, or a text: what the target reads as a user's message, and what it writes as its answer.

    Attributes:
        messages: Messages with all their fields. An assistant's turn to be answered has no `content`.
        first_trained: The assistant's turns from this one on are the target's.
        ended: Whether the last answer ended, or else was cut at a limit.
        extras: What the row gives its template: `tools`, `documents` and further arguments.
        drops_answer: Whether the row began with answers, which are left out.
        text: Of a text, for which there is no chat template, the column of it: `completion` or `text`.
        generations: What the target read and wrote each time, as token ids, if it wrote the row.
    """

    messages: list[dict[str, Any]]
    first_trained: int
    ended: bool
    extras: dict[str, Any]
    drops_answer: bool = False
    text: str = ""
    generations: list[tuple[list[int], list[int]]] = field(default_factory=list)

    @property
    def turns(self) -> list[int]:
        """The places of the target's answers."""
        turns = range(self.first_trained, len(self.messages))
        return [turn for turn in turns if self.messages[turn]["role"] == "assistant"]

    @property
    def question(self) -> str:
        """What a user says first, or how a text begins."""
        if self.text == "text":
            return "".join(message.get("content") or "" for message in self.messages)[:_TEXT_CHARACTERS]
        said = (message["content"] for message in self.messages if message["role"] == "user")
        return str(next(said, ""))


def read_row(row: Mapping[str, Any], has_template: bool, answered: bool = True) -> Example:
    """
    Reads a row in any of the known forms.

    Args:
        row: `messages`, `conversations` or `conversation` (a list of `role` and `content`, or of `from` and `value`),
            `prompt` and `completion` (text, or lists of messages) or other names of them (`instruction`, `input` and
            `output`; `question` and `answer`), or `text`; or one line of JSON with any of these.
            `system` (or `system_prompt`) is the system prompt of a conversation without one. `tools`, `documents` and
            `chat_template_kwargs` are for the template. Where `ended` is false, the last answer was cut at a limit.
        has_template: Whether the target's tokenizer has a chat template; without one a text prompt is taken as it is.
        answered: Whether the answers of the row are used. Otherwise a question needs none.

    Raises:
        MalformedRowError: It has none of these forms.
    """
    try:
        return _read(parse_row(row), has_template, answered)
    except UserValueError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise MalformedRowError(f"has a field of an unknown form ({error!r})") from error


def _read(row: dict[str, Any], has_template: bool, answered: bool) -> Example:
    if "skipped" in row:
        raise MalformedRowError(str(row["skipped"]))
    if medium := next((name for name in _MEDIA if row.get(name)), None):
        raise MalformedRowError(f"has a column {medium!r}, which is not text")
    turns, first_trained, text = _find_turns(row, has_template, answered)
    if not isinstance(turns, list) or not turns:
        raise MalformedRowError("its conversation is not a list of messages, or is empty")
    messages = [_read_message(turn, answered) for turn in turns]
    if not answered and messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    # The continuation of a conversation that was cut in two begins with an answer to a question that is not here.
    num_dropped = len(list(takewhile(lambda message: message["role"] == "assistant", messages)))
    messages = messages[num_dropped:]
    first_trained = max(first_trained - num_dropped, 0)
    system = next((row[name] for name in _SYSTEM if row.get(name)), None)
    if system and not text and not {"system", "developer"} & {message["role"] for message in messages}:
        messages.insert(0, _read_message({"role": "system", "content": system}, answered))
        first_trained += 1
    extras = _parsed(row.get("chat_template_kwargs") or {})
    found = {name: _read_objects(row, name) for name in ("functions", "tools", "documents") if row.get(name)}
    if functions := found.pop("functions", []):  # OpenAI's name for them before `tools`
        found = {"tools": [{"type": "function", "function": function} for function in functions]} | found
    extras |= {name: objects for name, objects in found.items() if objects}  # an empty list is none
    generations = [(each["prompt_ids"], each["answer_ids"]) for each in row.get("generations", [])]
    if not all(0 <= token < 2**31 for pair in generations for ids in pair for token in ids):
        raise MalformedRowError("its `generations` hold numbers that are no tokens")
    ended = row.get("ended", True)
    example = Example(messages, first_trained, ended, extras, num_dropped > 0, text, generations)
    if not example.turns:
        raise MalformedRowError("the assistant says nothing")
    return example


def first_question(row: Mapping[str, Any]) -> str:
    """Returns what a user says first in a row, or how its text begins; nothing where it cannot be used."""
    try:
        return read_row(row, has_template=True, answered=False).question
    except MalformedRowError:
        return ""


def _find_turns(row: Mapping[str, Any], has_template: bool, answered: bool) -> tuple[Any, int, str]:
    """Returns the messages of a row, the first one that may be trained on, and for a text the column of it."""
    name = next((name for name in _CONVERSATION if name in row), None)
    prompt, completion = read_pair(row)
    if name is not None:
        return _parsed(row[name]), 0, ""
    if prompt is not None and (completion is not None or not (answered or row.get("text"))):
        is_text = isinstance(prompt, str) and isinstance(completion, str | None)
        if is_text:
            prompt = [{"role": "user", "content": prompt}]
            completion = completion and [{"role": "assistant", "content": completion}]
        return prompt + (completion or []), len(prompt), "completion" if is_text and not has_template else ""
    if not row.get("text"):
        raise MalformedRowError(f"has none of {_FORMS}, only {', '.join(map(repr, sorted(row))) or 'nothing'}")
    empty = {"role": "user", "content": ""}
    # The target continues it, or has written it.
    if answered:
        return [empty, {"role": "assistant", "content": row["text"]}], 0, "text"
    return [empty | {"content": row["text"]}], 0, "text"


def _read_message(turn: Any, answered: bool) -> dict[str, Any]:
    fields = turn if isinstance(turn, Mapping) else {}
    message = {name: value for name, value in fields.items() if value is not None}
    if isinstance(call := message.pop("function_call", None), Mapping):  # OpenAI's name for it before `tool_calls`
        message["tool_calls"] = [{"type": "function", "function": call}]
    name = message.pop("from", message.get("role"))
    content = message.pop("value", message.get("content"))
    role = _ROLES.get(str(name).lower())
    calls = _read_calls(message)
    reasoning = next((message[field] for field in REASONING if message.get(field)), None)
    parts: list[Any] = content if isinstance(content, list) else [None]
    if all(isinstance(part, dict) and isinstance(part.get("text"), str) and _is_text(part) for part in parts):
        content = "".join(part["text"] for part in parts)
    is_open = role == "assistant" and not answered
    if name is None or (content is None and not (calls or reasoning or is_open)):
        raise MalformedRowError("a message has no `role` or `content`")
    if role is None:
        raise MalformedRowError(f"unknown role {name!r}")
    if not isinstance(content, str | None):
        raise MalformedRowError("the content of a message is not text")
    if role == "assistant" and not (content or calls or reasoning or is_open):
        raise MalformedRowError("the assistant says nothing")
    message |= {"role": role, "content": content}
    message.pop("tool_calls", None)  # templates ask whether there is any such list
    if reasoning:
        message |= dict.fromkeys(REASONING, reasoning)
    return message | ({"tool_calls": calls} if calls else {})


def _is_text(part: Mapping[str, Any]) -> bool:
    """Whether a part of a content is text: the fields of an image may include an empty one."""
    return str(part.get("type", "text")).endswith("text")


def _read_calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns tool calls whose arguments, JSON in OpenAI's protocol, are what most templates want: a dict."""
    calls = _read_objects(message, "tool_calls") if message.get("tool_calls") else []
    functions = [call.get("function", call) for call in calls]
    parsed = [
        function | {"name": function["name"], "arguments": _parsed(function.get("arguments", {}))}
        for function in functions
    ]
    pairs = zip(calls, parsed, strict=True)
    return [call | {"function": new} if "function" in call else new for call, new in pairs]


def _read_objects(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Returns a list of objects; the list or each object may be written as JSON."""
    found = _parsed(row[name])
    found = [_parsed(item) for item in found] if isinstance(found, list) else [None]
    if not all(isinstance(item, dict) for item in found):
        raise MalformedRowError(f"its `{name}` are no list of objects, nor the JSON of one")
    return found


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
