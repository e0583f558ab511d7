"""Rows of what a target wrote: as text, and as tokens where the text does not encode back to them."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from .conversations import MalformedRowError, RawText, read_row
from .rendering import counting_states, decode, encode


Turn = tuple[list[int], list[int]]  # what the target read, and what it wrote


def answer_text(tokenizer: PreTrainedTokenizerBase, tokens: list[int], ended: bool) -> str:
    """Returns the text of an answer, with its special tokens (reasoning marks, channels), but for its end."""
    return decode(tokenizer, tokens[: -1 if ended else None])


def written_row(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns a row, with the tokens of its turns where training on its text would not be training on these."""
    if _encodes_back(tokenizer, row, turns):
        return row
    return row | {"written": [{"prompt": prompt, "answer": answer} for prompt, answer in turns]}


def _encodes_back(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], turns: Sequence[Turn]) -> bool:
    """Whether what counts in the encoded row is what the target wrote, after what it read, and nothing else."""
    try:
        example = read_row(row, has_template=bool(tokenizer.chat_template))
        ((ids, assistant),) = encode(tokenizer, example)
    except MalformedRowError:
        return False
    counts = counting_states(ids, assistant, tokenizer.eos_token_id)
    # Of a text without a prompt, what the target read is learned, too.
    done = len(turns[0][0]) if isinstance(example, RawText) and not example.prompt else 0
    for prompt, answer in turns:
        first, last = len(prompt), len(prompt) + len(answer) - 1
        if ids[: last + 1] != prompt + answer or any(counts[done:first]) or not all(counts[first:last]):
            return False
        done = last
    return not any(counts[done:])
