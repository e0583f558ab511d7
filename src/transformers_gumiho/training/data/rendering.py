"""From a conversation or text to token ids, and which of them the target wrote."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from ...open_text import count_closing_tokens, encode_open_text
from ...user_errors import UserValueError
from .conversations import REASONING, Conversation, MalformedRowError, RawText


Text = tuple[list[int], list[int]]  # token ids, and for each whether it is the target's (1) or not (0)
# Why it is not clear which tokens of a conversation are the target's.
_WAY_OUT = (
    "Let the target answer (`regenerate_dataset`), which keeps the tokens, or mark the assistant's turns in the "
    "template with {% generation %} and {% endgeneration %}"
)
UNCLEAR = f"the chat template opens an answer in another way than it shows the answer afterwards. {_WAY_OUT}"
REWRITTEN = f"the chat template hides or rewrites what the assistant says. {_WAY_OUT}"
DOUBLED = f"the chat template writes a block before an answer that begins with such a block itself. {_WAY_OUT}"
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ANSWER = "9b1f6c-the-assistant-speaks-here-4e02"  # what no template writes by itself


def with_template_kwargs(
    tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None
) -> PreTrainedTokenizerBase:
    """Returns a tokenizer whose chat template takes these arguments wherever it is rendered without others."""
    if not kwargs or not tokenizer.chat_template:
        return tokenizer
    lines = [f"{{%- set {name} = {name} if {name} is defined else {value!r} -%}}" for name, value in kwargs.items()]
    tokenizer, template = copy.copy(tokenizer), tokenizer.chat_template
    is_one = isinstance(template, str)
    templates = {name: "".join(lines) + text for name, text in ({"": template} if is_one else template).items()}
    tokenizer.chat_template = templates[""] if is_one else templates
    return tokenizer


class Renderer:
    """Renders conversations and texts with the tokenizer of a target."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        try:
            added = tokenizer.added_tokens_decoder.items()
        except (AttributeError, NotImplementedError) as error:
            raise UserValueError(
                f"{type(tokenizer).__name__} does not say which of its tokens are special. Load the target's "
                f"`tokenizer.json` instead (`PreTrainedTokenizerFast`)."
            ) from error
        self._special = {tokenizer.eos_token_id} | {number for number, token in added if token.special}
        self._is_marked = False
        if tokenizer.chat_template:
            self._is_marked = _GENERATION_MARK.search(tokenizer.get_chat_template()) is not None

    def prompt(self, messages: Sequence[Mapping[str, Any]], extras: Mapping[str, Any]) -> list[int]:
        """Returns the token ids of messages to answer."""
        return self._encode(self._render(messages, extras, add_generation_prompt=True))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included, that comes closest to encoding back to them."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def end_of_answer(self) -> int:
        """The token with which the chat template ends an answer; without one, the tokenizer's end of a text."""
        try:
            text = self._render([{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}], {})
            ids = self._encode(text.partition(_ANSWER)[2])
        except (MalformedRowError, ValueError):
            ids = []
        return next((token for token in ids if token in self._special), self.tokenizer.eos_token_id)

    def after_marks(self, text: str) -> str:
        """Returns what follows the last special token of a text."""
        ids = self._encode(text)
        last = next((n for n in reversed(range(len(ids))) if ids[n] in self._special), -1)
        return self.decode(ids[last + 1 :])

    def texts(self, example: Conversation | RawText) -> list[Text]:
        """
        Returns the texts of an example: one, or several where the template shows earlier turns in another way later.

        Raises:
            MalformedRowError: The chat template refuses the conversation, or does not show which of its tokens are
                the target's.
            ValueError: There is no chat template.
        """
        if isinstance(example, RawText):
            return [self._raw_text(example)]
        messages = example.messages
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        turns = [n for n in turns if n >= example.first_trained]
        texts = [self._marked(example)] if self._is_marked else [self._turn(example, n) for n in turns]
        ids, learned = texts[-1]
        last = max((n for n, mark in enumerate(learned) if mark), default=0)
        if not example.ended and ids[last] in self._special:
            learned[last] = 0  # the target was cut before it wrote its end
        return merge(texts)

    def _turn(self, example: Conversation, turn: int) -> Text:
        """Returns the conversation up to an answer, of which the answer's own tokens are learned."""
        before, message = example.messages[:turn], example.messages[turn]
        prompt = self._render(before, example.extras, add_generation_prompt=True)
        whole = self._render([*before, message], example.extras)
        if not whole.startswith(prompt):
            raise MalformedRowError(UNCLEAR)
        answer, content = whole[len(prompt) :], (message["content"] or "").strip()
        said = [str(message.get(REASONING[0], "")).strip(), content]
        said += [call.get("function", call)["name"] for call in message.get("tool_calls", [])]
        if any(text not in answer for text in said):
            raise MalformedRowError(REWRITTEN)
        if not (content and answer.startswith(content)):
            # What the template writes before any answer is not the target's, such as an empty block of reasoning.
            other = self._render([*before, {"role": "assistant", "content": _ANSWER}], example.extras)
            block = other[len(prompt) :].partition(_ANSWER)[0]
            if block.strip() and answer.startswith(block):
                if content.startswith(block.split()[0]):
                    raise MalformedRowError(DOUBLED)
                answer = answer.removeprefix(block)
        ids = self._encode(whole)
        first, last = self._first_token(ids, self._encode(prompt), answer), self._num_written(ids)
        return ids, [int(first <= n < last) for n in range(len(ids))]

    def _marked(self, example: Conversation) -> Text:
        """Returns a conversation whose template marks what the assistant says."""
        encoding = self._apply(example.messages, example.extras, tokenize=True, return_assistant_tokens_mask=True)
        ids, learned = list(encoding["input_ids"]), list(encoding["assistant_masks"])
        before = example.messages[: example.first_trained]
        first = len(self._encode(self._render(before, example.extras))) if before else 0
        last = self._num_written(ids)
        return ids, [int(mark and first <= n < last) for n, mark in enumerate(learned)]

    def _raw_text(self, example: RawText) -> Text:
        ids = encode_open_text(self.tokenizer, example.prompt + example.completion)
        read = encode_open_text(self.tokenizer, example.prompt) if example.prompt else []
        first = self._first_token(ids, read, example.completion) if example.prompt else 0
        learned = [int(n >= first) for n in range(len(ids))]
        if example.ended:  # the target ends its text, so the end has to be drafted, too
            num_closing = count_closing_tokens(self.tokenizer)
            closing = self.tokenizer("a")["input_ids"][-num_closing:] if num_closing else [self.tokenizer.eos_token_id]
            if closing != [None] and (num_closing or ids[-1:] != closing):
                return ids + closing, learned + [1] * len(closing)
        return ids, learned

    def _first_token(self, ids: list[int], read: list[int], tail: str) -> int:
        """Returns the first token that begins within `tail`, the end of a text; a prompt of it encodes to `read`."""
        if ids[: len(read)] == read and len(self.decode(ids[len(read) :])) <= len(tail):
            return len(read)
        pairs = zip(ids, read, strict=False)
        first = next((n for n, (token, other) in enumerate(pairs) if token != other), min(len(ids), len(read)))
        # A token that begins before the tail belongs to what the target reads: it does not choose it.
        while first < len(ids) and len(self.decode(ids[first:])) > len(tail):
            first += 1
        return first

    def _num_written(self, ids: list[int]) -> int:
        """Returns the number of tokens up to the end of the last turn: the target does not write what follows it."""
        last = next((n for n in reversed(range(len(ids))) if ids[n] in self._special), len(ids))
        return len(ids) if self.decode(ids[last + 1 :]).strip() else last + 1

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, messages: Sequence[Mapping[str, Any]], extras: Mapping[str, Any], **settings: Any) -> str:
        return str(self._apply(messages, extras, tokenize=False, **settings))

    def _apply(self, messages: Sequence[Mapping[str, Any]], extras: Mapping[str, Any], **settings: Any) -> Any:
        if not self.tokenizer.chat_template:
            raise UserValueError(
                f"The dataset holds conversations, and the target's tokenizer {self.tokenizer.name_or_path!r} has no "
                f"chat template. Set `tokenizer.chat_template` (`--chat_template FILE` in the commands), or give the "
                f"dataset a `text` column."
            )
        settings |= {"return_dict": settings["tokenize"]}
        try:
            try:
                return self.tokenizer.apply_chat_template(list(messages), **extras, **settings)
            except TypeError:  # a template that joins the arguments of tools to its text, as DeepSeek's do
                texts = [_with_json_arguments(message) for message in messages]
                return self.tokenizer.apply_chat_template(texts, **extras, **settings)
        except (jinja2.TemplateError, TypeError) as error:
            raise MalformedRowError(f"the chat template refuses it: {error}") from error


def merge(texts: Sequence[Text]) -> list[Text]:
    """Joins texts of a conversation, of which each begins with the one before it; others stay apart."""
    merged: list[Text] = []
    for ids, learned in texts:
        before, marks = merged[-1] if merged else ([], [])
        if before and ids[: len(before)] == before:
            merged[-1] = (ids, marks + learned[len(before) :])
        else:
            merged.append((ids, learned))
    return merged


def counting_states(ids: list[int], learned: list[int], eos_token_id: int | None) -> list[int]:
    """
    Returns 1 for each state that counts as a target: its token and the next one are learned. After the end of a text
    nothing is drafted, whatever the template writes there.
    """
    pairs = zip(ids, learned, [*learned[1:], 0], strict=True)
    return [int(bool(ours and next_is_ours) and token != eos_token_id) for token, ours, next_is_ours in pairs]


def _with_json_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = copy.deepcopy(message.get("tool_calls") or [])
    for function in (call.get("function", call) for call in calls):
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return dict(message) | ({"tool_calls": calls} if calls else {})
