"""The tokens of a draft tree as text that can be read beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .cycles import Cycle


_CONTEXT = 16  # tokens of the text before the root that are shown, and that the tokens' texts may depend on
_LONGEST = 28


@dataclass(frozen=True)
class CycleLabels:
    """
    Attributes:
        context: The end of the text before the root.
        nodes: For each node, the text of its token, in quotes.
        bonus: The same of the bonus token, if there is one.
    """

    context: str
    nodes: tuple[str, ...]
    bonus: str | None


def label_cycle(tokenizer: PreTrainedTokenizerBase, committed: Sequence[int], cycle: Cycle) -> CycleLabels:
    """
    Args:
        tokenizer: The target's tokenizer.
        committed: The text before the cycle, its last token the root.
        cycle: The cycle.
    """
    before = list(committed[-_CONTEXT:-1])
    paths: list[list[int]] = [before]
    for node, token in enumerate(cycle.tokens):
        above = paths[0] if node == 0 else paths[cycle.parents[node] + 1]
        paths.append([*above, token])
    bonus = None if cycle.bonus_token is None else _label(tokenizer, paths[cycle.last_accepted + 1], cycle.bonus_token)
    return CycleLabels(
        context=shorten(repr(tokenizer.decode(before)), 2 * _LONGEST, keeps_end=True),
        nodes=tuple(_label(tokenizer, path[:-1], path[-1]) for path in paths[1:]),
        bonus=bonus,
    )


def _label(tokenizer: PreTrainedTokenizerBase, before: list[int], token: int) -> str:
    """Returns the text that a token adds to the text before it; its name where that is not a complete character."""
    start, longer = tokenizer.decode(before), tokenizer.decode([*before, token])
    text = longer[len(start) :]
    if not longer.startswith(start) or not text or "\N{REPLACEMENT CHARACTER}" in text:
        return f"<{tokenizer.convert_ids_to_tokens(token)}>"
    return shorten(repr(text), _LONGEST)


def shorten(text: str, length: int, keeps_end: bool = False) -> str:
    """Returns a text of at most `length` characters, cut at its end or its beginning."""
    if len(text) <= length:
        return text
    return f"…{text[1 - length :]}" if keeps_end else f"{text[: length - 1]}…"
