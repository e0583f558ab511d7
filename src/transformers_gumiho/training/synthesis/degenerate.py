"""Finding prompts that nobody would write: empty, endless, repetitive or garbled."""

import re
import zlib


MIN_CHARACTERS = 8
# A text of repetitions is a fifth of its size when compressed; prose is a half.
_MAX_COMPRESSION = 5.0
_COMPRESSED_FROM = 100
_MIN_LETTERS = 0.3
_RUN = re.compile(r"(.{1,20}?)\1{7,}", re.DOTALL)


def why_degenerate(text: str, ended: bool, special_tokens: list[str]) -> str | None:
    """Returns why a self-written prompt is useless, or `None`. Only templates write the `special_tokens`."""
    if not ended:
        return "does not end"
    if len(text) < MIN_CHARACTERS:
        return "too short"
    if "�" in text or any(token in text for token in special_tokens):
        return "garbled"
    if sum(map(str.isalpha, text)) < _MIN_LETTERS * len(text):
        return "hardly any letters"
    data = text.encode()
    repeats = len(data) >= _COMPRESSED_FROM and len(data) > _MAX_COMPRESSION * len(zlib.compress(data))
    return "repeats itself" if repeats or _RUN.search(text) else None
