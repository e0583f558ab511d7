"""From a conversation to token ids, and which of them the assistant says."""

import re
from collections.abc import Callable
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from ..open_text import count_closing_tokens, encode_open_text
from .conversations import Conversation, MalformedRowError, RawText


_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class UnstableTemplateError(ValueError):
    """A chat template under which it cannot be told which tokens the assistant says."""


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `ValueError` for a tokenizer that cannot say where in a text its tokens are."""
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not tell where in a text its tokens are. Load the fast tokenizer "
            f"(`use_fast=True`)."
        )


def encode(tokenizer: PreTrainedTokenizerBase, example: Conversation | RawText) -> tuple[list[int], list[int]]:
    """
    Encodes an example.

    Returns:
        Token ids, and for each whether it is the assistant's (1), and so may be drafted, or not (0).

    Raises:
        MalformedRowError: The chat template refuses the conversation.
        UnstableTemplateError: The template does not mark the assistant's tokens, and renders the beginning of a
            conversation differently from the whole.
    """
    if isinstance(example, RawText):
        return _encode_text(tokenizer, example)
    if not tokenizer.chat_template:
        raise ValueError(
            f"The dataset holds conversations, and the target's tokenizer {tokenizer.name_or_path!r} has no chat "
            f"template. Set `tokenizer.chat_template` (`--chat_template FILE` in the examples), or give the dataset a "
            f"`text` column."
        )
    try:
        if _GENERATION_MARK.search(tokenizer.get_chat_template()):
            return _encode_marked(tokenizer, example)
        return _encode_by_prefixes(tokenizer, example)
    except jinja2.TemplateError as error:
        raise MalformedRowError(f"the chat template refuses it: {error}") from error


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, example: Conversation | RawText, num_text_tokens: int
) -> list[int]:
    """
    Returns the token ids that the target is asked to go on from: the conversation up to the first trained answer, or
    the prompt of a raw text, or where it has none, its first `num_text_tokens` tokens.
    """
    if isinstance(example, RawText):
        ids = encode_open_text(tokenizer, example.prompt or example.completion)
        return ids if example.prompt else ids[:num_text_tokens]
    turn = next(
        index
        for index, message in enumerate(example.messages)
        if message["role"] == "assistant" and index >= example.first_trained
    )
    return render_prompt(tokenizer, example.messages[:turn])


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Returns the token ids of messages that the assistant is to answer."""
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def _encode_text(tokenizer: PreTrainedTokenizerBase, example: RawText) -> tuple[list[int], list[int]]:
    encoding = tokenizer(example.prompt + example.completion, return_offsets_mapping=True)
    ids, boundary = list(encoding["input_ids"]), len(example.prompt)
    mask = [int(start >= boundary) for start, _ in encoding["offset_mapping"]]
    # The target ends its text, so the end has to be drafted, too. What the tokenizer adds has no place in the text.
    num_closing = count_closing_tokens(tokenizer)
    mask[len(mask) - num_closing :] = [1] * num_closing
    if not num_closing and tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
        mask.append(1)
    return ids, mask


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
    whole, spans = render(example.messages), []
    for index, message in enumerate(example.messages):
        if message["role"] != "assistant" or index < example.first_trained:
            continue
        before = render(example.messages[:index], add_generation_prompt=True)
        through = render(example.messages[: index + 1])
        if not (through.startswith(before) and whole.startswith(through)):
            raise UnstableTemplateError(
                "The chat template renders the beginning of a conversation differently from the whole (templates "
                "that drop earlier reasoning do), so the assistant's tokens cannot be told from the others. Mark them "
                "with {% generation %} ... {% endgeneration %} in the template, or train on single turns."
            )
        spans.append((len(before), len(through)))
    return spans
