"""The forms in which datasets write conversations and texts."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...user_errors import UserValueError
from .sources import JSON_LINE


# Who speaks, as datasets write it and as chat templates want it.
_ROLES = {"system": "system", "developer": "developer", "user": "user", "human": "user"}
_ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant")
_ROLES |= dict.fromkeys(("tool", "function", "observation"), "tool")
# The names that servers, datasets and templates have for what the assistant thinks.
REASONING = ("reasoning_content", "reasoning", "thinking")
FORMATS = "`messages`, `conversations`, `prompt` and `completion`, or `text`"


class MalformedRowError(UserValueError):
    """A row that cannot be used; its message is the reason it is counted under."""


@dataclass
class LeftOut:
    """Counts rows that are left out, by reason, each with the index of its first row."""

    problems: Counter[str] = field(default_factory=Counter)
    first_rows: dict[str, int] = field(default_factory=dict)

    def add(self, problem: str, row: int) -> None:
        """Counts a row."""
        self.problems[problem] += 1
        self.first_rows.setdefault(problem, row)

    def lines(self) -> list[str]:
        """Returns a line for each reason."""
        return [
            f"  left out {count:,} (the first is row {self.first_rows[problem]}): {problem}"
            for problem, count in self.problems.most_common()
        ]


@dataclass(frozen=True)
class Conversation:
    """
    A conversation under a chat template.

    Attributes:
        messages: Messages with all their fields. An assistant's turn to be answered has no `content`.
        first_trained: The assistant's turns from this one on are the target's.
        ended: Whether the last answer ended, or else was cut at a limit.
        extras: What the row gives its template: `tools`, `documents` and further arguments.
        drops_answer: Whether the row began with an answer, which is left out.
    """

    messages: list[dict[str, Any]]
    first_trained: int = 0
    ended: bool = True
    extras: dict[str, Any] = field(default_factory=dict)
    drops_answer: bool = False


@dataclass(frozen=True)
class RawText:
    """Text without a chat template. The drafter learns `completion`; a long one is cut into windows."""

    prompt: str
    completion: str
    ended: bool = True


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


def read_row(row: Mapping[str, Any], has_template: bool, answered: bool = True) -> Conversation | RawText:
    """
    Reads a row in any of the known forms.

    Args:
        row: `messages` or `conversations` (a list of `role` and `content`, or of `from` and `value`), `prompt` and
            `completion` (text, or lists of messages), or `text`; or one line of JSON with any of these. `tools`,
            `documents` and `chat_template_kwargs` are for the template. Where `ended` is false, the last answer was
            cut at a limit.
        has_template: Whether the target's tokenizer has a chat template; without one a text prompt is taken as it is.
        answered: Whether the answers of the row are used. Otherwise a question needs none.

    Raises:
        MalformedRowError: It has none of these forms.
    """
    row = parse_row(row)
    if row.get("skipped"):
        raise MalformedRowError(str(row["skipped"]))
    ended, prompt, completion = row.get("ended", True), row.get("prompt"), row.get("completion")
    messages, first_trained = row.get("messages", row.get("conversations")), 0
    if messages is None and prompt is not None and (completion is not None or not (answered or row.get("text"))):
        if isinstance(prompt, str) and isinstance(completion, str | None):
            if not completion and answered:
                raise MalformedRowError("the completion is empty")
            if not has_template:
                return RawText(prompt, completion or "", ended)
            prompt = [{"role": "user", "content": prompt}]
            completion = [{"role": "assistant", "content": completion}]
        if not isinstance(prompt, list) or not isinstance(completion, list | None):
            raise MalformedRowError("`prompt` and `completion` are neither both text nor both messages")
        messages, first_trained = prompt + (completion or []), len(prompt)
    if messages is not None:
        return _read_conversation(row, messages, first_trained, ended, answered)
    if isinstance(row.get("text"), str) and row["text"]:
        return RawText("", row["text"], ended)
    raise MalformedRowError(f"has none of {FORMATS}")


def _read_conversation(
    row: dict[str, Any], turns: Any, first_trained: int, ended: bool, answered: bool
) -> Conversation:
    if not isinstance(turns, list) or not turns:
        raise MalformedRowError("its conversation is not a list of messages, or is empty")
    messages = [_read_message(turn, answered) for turn in turns]
    if not answered and messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    # The continuation of a conversation that was cut in two begins with an answer to a question that is not here.
    drops_answer = messages[0]["role"] == "assistant"
    messages, first_trained = messages[drops_answer:], max(first_trained - drops_answer, 0)
    if all(message["role"] != "assistant" for message in messages[first_trained:]):
        raise MalformedRowError("the assistant says nothing")
    extras = _json(row.get("chat_template_kwargs", {})) | {
        name: _json(row[name]) for name in ("tools", "documents") if row.get(name)
    }
    return Conversation(messages, first_trained, ended, extras, drops_answer)


def _read_message(turn: Any, answered: bool) -> dict[str, Any]:
    message = dict(turn) if isinstance(turn, Mapping) else {}
    name, content = message.pop("from", message.get("role")), message.pop("value", message.get("content"))
    role, calls = _ROLES.get(str(name).lower()), message.get("tool_calls")
    reasoning = next((message[field] for field in REASONING if message.get(field)), None)
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(part["text"] for part in content)
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
    if reasoning:
        message |= dict.fromkeys(REASONING, reasoning)
    if calls:
        message["tool_calls"] = [_with_arguments(call) for call in calls]
    return message


def _with_arguments(call: Any) -> Any:
    """Returns a tool call whose arguments, JSON in OpenAI's protocol, are what most templates want: a dict."""
    function = call.get("function", call)
    parsed = dict(function) | {"arguments": _json(function.get("arguments", {}))}
    return call | {"function": parsed} if "function" in call else parsed


def _json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _without_none(value: Any) -> Any:
    """Returns a value without empty fields, which tables fill in wherever another row has something."""
    if isinstance(value, Mapping):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value
