"""From a conversation to token ids, and which of them the assistant says."""

import re
from collections.abc import Callable
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from ..open_text import count_closing_tokens
from ..user_errors import UserValueError
from .conversations import Conversation, Example, MalformedRowError, RawText, WrittenTokens


# For example templates that drop earlier reasoning, or put the system prompt into the last turn.
UNCLEAR = (
    "the chat template renders its beginning differently from all of it, so which tokens the assistant says is not "
    "clear. Let the target answer (`regenerate_dataset`), which keeps the tokens, or mark the assistant's turns in "
    "the template with {% generation %} and {% endgeneration %}"
)
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `ValueError` for a tokenizer that cannot say where in a text its tokens are."""
    if not tokenizer.is_fast:
        raise UserValueError(
            f"{type(tokenizer).__name__} does not report where in a text its tokens are. Load the fast tokenizer "
            f"(`use_fast=True`)."
        )


def encode(tokenizer: PreTrainedTokenizerBase, example: Example) -> list[tuple[list[int], list[int]]]:
    """
    Returns the texts of an example, one for each of several written turns: token ids, and for each whether it is the
    assistant's (1), and so may be drafted, or not (0).

    Raises:
        MalformedRowError: The chat template refuses the conversation, or does not show which of its tokens are the
            assistant's; or the tokens are another tokenizer's.
    """
    if isinstance(example, WrittenTokens):
        return _read_tokens(tokenizer, example)
    if isinstance(example, RawText):
        return [_encode_text(tokenizer, example)]
    if not tokenizer.chat_template:
        raise UserValueError(
            f"The dataset holds conversations, and the target's tokenizer {tokenizer.name_or_path!r} has no chat "
            f"template. Set `tokenizer.chat_template` (`--chat_template FILE` in the examples), or give the dataset a "
            f"`text` column."
        )
    try:
        is_marked = _GENERATION_MARK.search(tokenizer.get_chat_template())
        ids, assistant = (_encode_marked if is_marked else _encode_by_prefixes)(tokenizer, example)
    except jinja2.TemplateError as error:
        raise MalformedRowError(f"the chat template refuses it: {error}") from error
    if not example.ended:
        _unmark_closing(ids, assistant, tokenizer.eos_token_id)
    return [(ids, assistant)]


def counting_states(ids: list[int], assistant: list[int], eos_token_id: int | None) -> list[int]:
    """
    Returns 1 for each state that counts as a target: its token and the next one are the assistant's. After the end of
    a text nothing is drafted, whatever the template writes there.
    """
    pairs = zip(ids, assistant, [*assistant[1:], 0], strict=True)
    return [int(bool(ours and next_is_ours) and token != eos_token_id) for token, ours, next_is_ours in pairs]


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Returns the token ids of messages to answer. Raises `MalformedRowError` if the chat template refuses them."""
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    except jinja2.TemplateError as error:
        raise MalformedRowError(f"the chat template refuses it: {error}") from error


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Returns the text of tokens, special ones included, that comes closest to encoding back to them."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _read_tokens(tokenizer: PreTrainedTokenizerBase, example: WrittenTokens) -> list[tuple[list[int], list[int]]]:
    read = [prompt + answer for prompt, answer in example.turns]
    foreign = not read or any(not 0 <= token < len(tokenizer) for ids in read for token in ids)
    if foreign or example.text.strip() not in decode(tokenizer, read[-1]):
        raise MalformedRowError("its `written` tokens are another tokenizer's")
    return [(prompt + answer, [0] * len(prompt) + [1] * len(answer)) for prompt, answer in example.turns]


def _encode_text(tokenizer: PreTrainedTokenizerBase, example: RawText) -> tuple[list[int], list[int]]:
    encoding = tokenizer(example.prompt + example.completion, return_offsets_mapping=True)
    ids, boundary = list(encoding["input_ids"]), len(example.prompt)
    mask = [int(start >= boundary) for start, _ in encoding["offset_mapping"]]
    num_closing = count_closing_tokens(tokenizer)
    closing = ids[len(ids) - num_closing :]
    if not num_closing and tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        closing = [tokenizer.eos_token_id]
    # The target ends its text, so the end has to be drafted, too. What the tokenizer adds has no place in the text.
    closing, kept = closing if example.ended else [], len(ids) - num_closing
    return ids[:kept] + closing, mask[:kept] + [1] * len(closing)


def _unmark_closing(ids: list[int], assistant: list[int], eos_token_id: int | None) -> None:
    """Marks the end of the last turn, and what follows it, as not the assistant's."""
    for index in range(len(ids) - 1, 0, -1):
        if assistant[index] and ids[index] == eos_token_id:
            assistant[index:] = [0] * len(assistant[index:])
            return
        if assistant[index] > assistant[index - 1]:
            return  # the turn begins here, and the template closes it with something else


def _encode_marked(tokenizer: PreTrainedTokenizerBase, example: Conversation) -> tuple[list[int], list[int]]:
    def render(messages: list[dict[str, str]]) -> Any:
        return tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )

    encoding = render(example.messages)
    ids, mask = list(encoding["input_ids"]), list(encoding["assistant_masks"])
    if example.first_trained:
        untrained = len(render(example.messages[: example.first_trained])["input_ids"])
        mask[:untrained] = [0] * min(untrained, len(mask))
    return ids, mask


def _encode_by_prefixes(tokenizer: PreTrainedTokenizerBase, example: Conversation) -> tuple[list[int], list[int]]:
    def render(messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    spans = assistant_spans(render, example)
    encoding = tokenizer(render(example.messages), add_special_tokens=False, return_offsets_mapping=True)
    # A token that begins before a span belongs to the prompt: the target does not choose it.
    mask = [int(any(begin <= start < end for begin, end in spans)) for start, _ in encoding["offset_mapping"]]
    return list(encoding["input_ids"]), mask


def assistant_spans(render: Callable[..., str], example: Conversation) -> list[tuple[int, int]]:
    """Returns where in the rendered conversation the assistant's trained turns begin and end, in characters."""
    text, spans = render(example.messages), []
    for index, message in enumerate(example.messages):
        if message["role"] != "assistant" or index < example.first_trained:
            continue
        before = render(example.messages[:index], add_generation_prompt=True)
        through = render(example.messages[: index + 1])
        if not (through.startswith(before) and text.startswith(through)):
            raise MalformedRowError(UNCLEAR)
        spans.append((len(before), len(through)))
    return spans
