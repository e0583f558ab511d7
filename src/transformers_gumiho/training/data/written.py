"""What a target wrote, as token ids: the one form in which its own answers are kept and learned."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .conversations import MalformedRowError
from .rendering import Renderer, Text, merge


@dataclass(frozen=True)
class Generation:
    """What a target read (`prompt_ids`) and wrote (`answer_ids`, with its end if it `ended`) at one time."""

    prompt_ids: list[int]
    answer_ids: list[int]
    ended: bool


def written_texts(row: Mapping[str, Any], renderer: Renderer) -> list[Text] | None:
    """
    Returns the texts of a row's `generations`, or of the `written` tokens of earlier files; `None` without either.
    Raises `MalformedRowError` if they are damaged, or another tokenizer's: the last one has to be the row's answer.
    """
    try:
        if row.get("generations") is not None:
            pairs = [(item["prompt_ids"], item["answer_ids"]) for item in row["generations"]]
        elif row.get("written") is not None:
            pairs = [(item["prompt"], item["answer"]) for item in row["written"]]
        else:
            return None
        said = row.get("text") or row.get("completion") or row["messages"][-1]["content"]
        texts = [(prompt + answer, [0] * len(prompt) + [1] * len(answer)) for prompt, answer in pairs]
        read = texts[-1][0]
    except (KeyError, TypeError, IndexError):
        raise MalformedRowError("its tokens are no list of prompts and answers, with their text") from None
    size = len(renderer.tokenizer)
    if any(not 0 <= token < size for ids, _ in texts for token in ids) or said.strip() not in renderer.decode(read):
        raise MalformedRowError("its tokens are another tokenizer's")
    return merge(texts)
