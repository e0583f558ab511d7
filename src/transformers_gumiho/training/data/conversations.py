"""The forms in which datasets write conversations and texts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...files import MalformedRowError, parse_row


# Who speaks, as datasets write it and as chat templates want it.
_ROLES = {"system": "system", "developer": "developer", "user": "user", "human": "user"}
_ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant")
_ROLES |= dict.fromkeys(("tool", "function", "observation"), "tool")
# The names that servers, datasets and templates have for what the assistant thinks.
REASONING = ("reasoning_content", "reasoning", "thinking")
_FORMS = "`messages`, `conversations`, `prompt` and `completion`, or `text`"


@dataclass(frozen=True)
class Example:
    """
    A conversation, or a text: what the target reads as a user's message, and what it writes as its answer.

    Attributes:
        messages: Messages with all their fields. An assistant's turn to be answered has no `content`.
        first_trained: The assistant's turns from this one on are the target's.
        ended: Whether the last answer ended, or else was cut at a limit.
        extras: What the row gives its template: `tools`, `documents` and further arguments.
        drops_answer: Whether the row began with an answer, which is left out.
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


def read_row(row: Mapping[str, Any], has_template: bool, answered: bool = True) -> Example:
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
    if "skipped" in row:
        raise MalformedRowError(str(row["skipped"]))
    prompt, completion, text = row.get("prompt"), row.get("completion"), ""
    turns, first_trained = row.get("messages", row.get("conversations")), 0
    if turns is None and prompt is not None and (completion is not None or not (answered or row.get("text"))):
        if isinstance(prompt, str) and isinstance(completion, str | None):
            text = "" if has_template else "completion"
            prompt = [{"role": "user", "content": prompt}]
            completion = completion and [{"role": "assistant", "content": completion}]
        if not isinstance(prompt, list) or not isinstance(completion or [], list):
            raise MalformedRowError("`prompt` and `completion` are neither both text nor both messages")
        turns, first_trained = prompt + (completion or []), len(prompt)
    elif turns is None and row.get("text"):
        text, empty = "text", {"role": "user", "content": ""}
        # The target continues it, or has written it.
        turns = [empty, {"role": "assistant", "content": row[text]}] if answered else [empty | {"content": row[text]}]
    if turns is None:
        raise MalformedRowError(f"has none of {_FORMS}, only {', '.join(map(repr, sorted(row))) or 'nothing'}")
    if not isinstance(turns, list) or not turns:
        raise MalformedRowError("its conversation is not a list of messages, or is empty")
    messages = [_read_message(turn, answered) for turn in turns]
    if not answered and messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    # The continuation of a conversation that was cut in two begins with an answer to a question that is not here.
    drops_answer = messages[0]["role"] == "assistant"
    extras = _parsed(row.get("chat_template_kwargs", {}))
    extras |= {name: _parsed(row[name]) for name in ("tools", "documents") if row.get(name)}
    example = Example(
        messages[drops_answer:], max(first_trained - drops_answer, 0), row.get("ended", True), extras, drops_answer,
        text, _read_generations(row),
    )  # fmt: skip
    if not example.turns:
        raise MalformedRowError("the assistant says nothing")
    return example


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
    parsed = dict(function) | {"arguments": _parsed(function.get("arguments", {}))}
    return call | {"function": parsed} if "function" in call else parsed


def _read_generations(row: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    try:
        if "generations" in row:
            return [(item["prompt_ids"], item["answer_ids"]) for item in row["generations"]]
        return [(item["prompt"], item["answer"]) for item in row.get("written", [])]  # as earlier versions named them
    except (KeyError, TypeError):
        raise MalformedRowError("its `generations` are no list of `prompt_ids` and `answer_ids`") from None


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
