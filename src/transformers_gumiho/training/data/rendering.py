"""From a conversation or text to token ids, and which of them the target wrote."""

import copy
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ...commands import UserValueError
from .conversations import REASONING, Example
from .datasets import MalformedRowError
from .open_text import count_closing_tokens, encode_open_text


logger = logging.get_logger(__name__)

Messages = Sequence[Mapping[str, Any]]
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
MARK = "9b1f6c-somebody-speaks-here-4e02"  # what no template writes by itself


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

    def prompt(self, messages: Messages, extras: Mapping[str, Any], is_text: bool = False) -> list[int]:
        """Returns the token ids of messages to answer, or of a text to continue."""
        if is_text:
            return encode_open_text(self.tokenizer, "".join(message["content"] for message in messages))
        try:
            return self.encode(self._render(messages, extras, add_generation_prompt=True))
        except MalformedRowError:  # some templates want an answer without the marks around its reasoning
            said = [
                message | {"content": self._after_marks(message["content"])}
                if message["role"] == "assistant" and message["content"]
                else message
                for message in map(dict, messages)
            ]
            return self.encode(self._render(said, extras, add_generation_prompt=True))

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, without what the tokenizer puts around texts."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included, that comes closest to encoding back to them."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def continuation(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Returns the text of tokens after others: alone, some tokenizers drop the space in front of them."""
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    @cached_property
    def after_answer(self) -> tuple[int, str]:
        """
        The token with which the chat template ends an answer, without one the tokenizer's end of a text; and what it
        writes after that, such as the end of the whole text, or the opening of a further answer.
        """
        try:
            text = self._render([{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}], {})
        except ValueError:
            text = ""
        after = self.encode(text.partition(MARK)[2])
        end = next((n for n, token in enumerate(after) if token in self._special), None)
        if end is None:
            return self.tokenizer.eos_token_id, ""
        rest = self.decode(after[end + 1 :])
        return after[end], rest if rest.strip() else ""

    def _after_marks(self, text: str) -> str:
        ids = self.encode(text)
        return self.decode(ids[self._num_to_last_special(ids) :])

    def texts(self, example: Example) -> list[Text]:
        """
        Returns the texts of an example: one, or several where the template shows earlier turns in another way later.

        Raises:
            MalformedRowError: The chat template refuses the conversation, or does not show which of its tokens are
                the target's; or its tokens are another tokenizer's.
            ValueError: There is no chat template.
        """
        if example.generations:
            return self._written(example)
        if example.text:
            return [self._raw_text(example)]
        tokenizer = self.tokenizer
        if tokenizer.chat_template and _GENERATION_MARK.search(self._template(example.extras)):
            texts = [self._marked(example)]
        else:
            texts = [self._turn(example, turn) for turn in example.turns]
        ids, learned = texts[-1]
        last = max((n for n, mark in enumerate(learned) if mark), default=0)
        if not example.ended and ids[last] in self._special:
            learned[last] = 0  # the target was cut before it wrote its end
        return _merged(texts)

    def _written(self, example: Example) -> list[Text]:
        texts: list[Text] = []
        for prompt, answer in example.generations:
            texts.append((prompt + answer, [0] * len(prompt) + [1] * len(answer)))
        if (example.messages[-1]["content"] or "").strip() not in self.decode(texts[-1][0]):
            raise MalformedRowError("its tokens are another tokenizer's")
        return _merged(texts)

    def _turn(self, example: Example, turn: int) -> Text:
        """Returns the conversation up to an answer, of which the answer's own tokens are learned."""
        before, message = example.messages[:turn], example.messages[turn]
        prompt = self._render(before, example.extras, add_generation_prompt=True)
        whole = self._render([*before, message], example.extras).removesuffix(self.after_answer[1])
        if not whole.startswith(prompt):
            raise MalformedRowError(UNCLEAR)
        answer, content = whole[len(prompt) :], (message["content"] or "").strip()
        said = [str(message.get(REASONING[0], "")).strip(), content]
        said += [call.get("function", call)["name"] for call in message.get("tool_calls", [])]
        if any(text not in answer for text in said):
            raise MalformedRowError(REWRITTEN)
        if not (content and answer.startswith(content)):
            # What the template writes before any answer is not the target's, such as an empty block of reasoning.
            other = self._render([*before, {"role": "assistant", "content": MARK}], example.extras)
            block = other[len(prompt) :].partition(MARK)[0]
            if block.strip() and answer.startswith(block):
                if content.startswith(block.split()[0]):
                    raise MalformedRowError(DOUBLED)
                answer = answer.removeprefix(block)
        ids = self.encode(whole)
        return self._learned(ids, self._first_token(ids, self.encode(prompt), answer))

    def _marked(self, example: Example) -> Text:
        encoding = self._apply(example.messages, example.extras, tokenize=True, return_assistant_tokens_mask=True)
        before = example.messages[: example.first_trained]
        first = len(self.encode(self._render(before, example.extras))) if before else 0
        ids, learned = self._learned(list(encoding["input_ids"]), first)
        return ids, [is_ours * mark for is_ours, mark in zip(learned, encoding["assistant_masks"], strict=True)]

    def _raw_text(self, example: Example) -> Text:
        read, said = (message["content"] for message in example.messages)
        ids, first = encode_open_text(self.tokenizer, read + said), 0
        if read:
            first = self._first_token(ids, encode_open_text(self.tokenizer, read), said)
        if example.ended:  # the target ends its text, so the end has to be drafted, too
            num_closing = count_closing_tokens(self.tokenizer)
            closing = [self.tokenizer.eos_token_id]
            if num_closing:
                closing = self.tokenizer("a")["input_ids"][-num_closing:]
            if closing != [None] and (num_closing or ids[-1:] != closing):
                ids = ids + closing
        return ids, [int(n >= first) for n in range(len(ids))]

    def _first_token(self, ids: list[int], read: list[int], tail: str) -> int:
        """Returns the first token that begins within `tail`, the end of a text; a prompt of it encodes to `read`."""
        first = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, read, strict=False))))
        written = self.decode(self.encode(tail))
        if _compatible(written) == _compatible(tail):  # a normalizer makes other characters of the same text
            tail = written
        # A token that begins before the tail belongs to what the target reads: it does not choose it.
        while first < len(ids) and len(self.decode(ids[first:])) > len(tail):
            first += 1
        return first

    def _learned(self, ids: list[int], first: int) -> Text:
        """Returns a text that is learned from a token to the end of the last turn: what follows is the template's."""
        last = self._num_to_last_special(ids)
        last = last if last and not self.decode(ids[last:]).strip() else len(ids)
        return ids, [int(first <= n < last) for n in range(len(ids))]

    def _num_to_last_special(self, ids: list[int]) -> int:
        return max((n for n, token in enumerate(ids, 1) if token in self._special), default=0)

    def _template(self, extras: Mapping[str, Any]) -> str:
        """Returns the template of a row: some tokenizers have another one for tools."""
        try:
            return self.tokenizer.get_chat_template(tools=extras.get("tools"))
        except ValueError as error:
            raise MalformedRowError(f"the chat template refuses it: {error}") from error

    def _render(self, messages: Messages, extras: Mapping[str, Any], **settings: Any) -> str:
        return str(self._apply(messages, extras, tokenize=False, **settings))

    def _apply(self, messages: Messages, extras: Mapping[str, Any], **settings: Any) -> Any:
        if not self.tokenizer.chat_template:
            raise UserValueError(
                f"The dataset holds conversations, and the target's tokenizer {self.tokenizer.name_or_path!r} has no "
                f"chat template. Set `tokenizer.chat_template` (`--chat_template FILE` in the commands), or give the "
                f"dataset a `text` column."
            )
        for name in extras:
            if name not in self._template(extras):
                logger.warning_once(
                    f"The chat template ignores `{name}`, which rows give, so the target does not read it. Give "
                    f"another template (`--chat_template FILE` in the commands), or remove `{name}`."
                )
        settings |= {"return_dict": settings["tokenize"]}
        refusal = None
        for form in _forms(messages, self._writes_null):
            try:
                return self.tokenizer.apply_chat_template(form, **extras, **settings)
            except Exception as error:  # a template may compute anything from a row
                refusal = refusal or error
        raise MalformedRowError(f"the chat template refuses it: {refusal}") from refusal

    @cached_property
    def _writes_null(self) -> bool:
        """Whether the chat template writes "None" for a message without content, such as one of tool calls alone."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
        try:
            return "None" in self.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # as above
            return False


def _compatible(text: str) -> str:
    """Returns what is left of a text where characters that mean the same are one."""
    return unicodedata.normalize("NFKC", text).casefold()


def counting_states(ids: list[int], learned: list[int], eos_token_id: int | None) -> list[int]:
    """
    Returns 1 for each state that counts as a target: its token and the next one are learned. After the end of a text
    nothing is drafted, whatever the template writes there.
    """
    following = [*learned[1:], 0]
    are_ours = [bool(ours and then) for ours, then in zip(learned, following, strict=True)]
    return [int(ours and token != eos_token_id) for ours, token in zip(are_ours, ids, strict=True)]


def _merged(texts: list[Text]) -> list[Text]:
    """Joins texts of a conversation, of which each begins with the one before it; others stay apart."""
    merged: list[Text] = []
    for ids, learned in texts:
        before, marks = merged[-1] if merged else ([], [])
        if before and ids[: len(before)] == before:
            merged[-1] = (ids, marks + learned[len(before) :])
        else:
            merged.append((ids, learned))
    return merged


def _forms(messages: Messages, writes_null: bool) -> list[list[dict[str, Any]]]:
    """
    Returns the forms of messages that templates read: as they are; with the arguments of tool calls as JSON, which
    DeepSeek's join to their text; and with an empty text in place of a content that is null, first where the template
    writes "None" for it.
    """
    forms = [list(map(dict, messages))]
    if any(message.get("tool_calls") for message in messages):
        forms.append([_with_json_arguments(message) for message in messages])
    if any(message.get("content", "") is None for message in messages):
        filled = [[message | {"content": message.get("content") or ""} for message in form] for form in forms]
        forms = filled + forms if writes_null else forms + filled
    return forms


def _with_json_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = copy.deepcopy(message.get("tool_calls") or [])
    for function in (call.get("function", call) for call in calls):
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return dict(message) | ({"tool_calls": calls} if calls else {})
