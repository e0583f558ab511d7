"""What a tokenizer makes of texts and conversations that go on, with arguments of its chat template."""

import copy
import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ...commands import UserValueError, as_user_errors
from ...files import damaged_files_named, read_text


def encode_open_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """
    Returns the token ids of a text, without those that the tokenizer adds to every end (`</s>`, `[SEP]`). A text that
    was rendered before begins with the tokenizer's beginning of a text, which is read once.
    """
    ids = list(tokenizer(text)["input_ids"])
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        ids = ids[1:]
    return ids[: len(ids) - count_closing_tokens(tokenizer)]


def count_closing_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns how many tokens the tokenizer adds to the end of every text."""
    is_added = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    return next((index for index, added in enumerate(reversed(is_added)) if not added), 0)


def with_template_kwargs(
    tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None
) -> PreTrainedTokenizerBase:
    """Returns a tokenizer whose chat template takes these arguments wherever it is rendered without others."""
    if kwargs and tokenizer.chat_template:
        before = getattr(tokenizer.apply_chat_template, "keywords", {})
        tokenizer = copy.copy(tokenizer)
        render = type(tokenizer).apply_chat_template
        tokenizer.apply_chat_template = partial(render, tokenizer, **{**before, **kwargs})
    return tokenizer


def parse_template_kwargs(text: str | None) -> dict[str, Any]:
    """Returns the arguments of `--chat_template_kwargs`; raises `ValueError` for anything but a JSON object."""
    try:
        kwargs = json.loads(text or "{}")
    except ValueError:
        kwargs = None
    if not isinstance(kwargs, dict):
        raise UserValueError(f"--chat_template_kwargs must be a JSON object, got {text!r}.")
    return kwargs


def load_tokenizer(target: str, chat_template: Path | None, kwargs: str | None) -> PreTrainedTokenizerBase:
    """Returns a target's tokenizer, with the chat template of a file if one is given, and its arguments."""
    values = parse_template_kwargs(kwargs)
    with as_user_errors(), damaged_files_named(target):
        tokenizer = AutoTokenizer.from_pretrained(target)
    if chat_template is not None:
        tokenizer.chat_template = read_text(chat_template)
    if values and not tokenizer.chat_template:
        raise UserValueError(
            f"--chat_template_kwargs has no effect: the tokenizer of {target!r} has no chat template. Leave it out, "
            f"or give one with --chat_template."
        )
    return with_template_kwargs(tokenizer, values)


def encode_turn(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], answers: Sequence[str], system: str | None = None
) -> list[int]:
    """
    Returns the token ids of a conversation up to the turn after the last answer. Without a chat template, turns and
    answers are joined. Raises `ValueError` for a template that cannot be rendered, and for a `system` prompt without
    a template.
    """
    texts = [text for pair in zip_longest(turns, answers) for text in pair if text is not None]
    if not tokenizer.chat_template:
        if system is not None:
            raise UserValueError("A system prompt needs a chat template, and this tokenizer has none. Leave it out.")
        return encode_open_text(tokenizer, "".join(texts))
    roles = cycle(["user", "assistant"])
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    except Exception as error:
        if not type(error).__module__.startswith("jinja2"):  # which only templates need
            raise
        raise UserValueError(
            f"The chat template cannot be rendered: {error}. Repair it, or give another one with --chat_template."
        ) from error
