"""What happens in each verification cycle, and its tokens as text."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from ...commands import UserValueError
from ...generation.drafting.candidate_generator import DraftOrigin
from ...generation.observers import GenerationObserver, observing
from ...generation.tree.draft_tree import DraftTree
from ...generation.tree.walk import Path, find_children


# Tokens before others that their text may depend on: some tokenizers drop a space where a text begins.
CONTEXT = 16
# What a decoder writes for bytes that are not a complete character.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 28


@dataclass(frozen=True)
class Cycle:
    """
    One verification cycle of a single sequence. Node 0 is the root, the newest token that was committed before.

    Attributes:
        tokens: The token id of each node.
        parents: Each node's parent; the root is its own. Children of a node follow it, the best first.
        scores: For each node, the summed log-probability (nats) of the tokens from the root down to it.
        accepted: The drafted nodes that the target agreed with, from depth 1 down.
        bonus_token: The target's token after the last of them. `None` where the text ended before.
        origin: Where its tokens come from.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    accepted: tuple[int, ...]
    bonus_token: int | None
    origin: DraftOrigin = field(default_factory=lambda: DraftOrigin("drafter"))

    @property
    def is_paused(self) -> bool:
        """Whether the drafter was paused."""
        return self.origin.source == "pause"

    @property
    def committed(self) -> tuple[int, ...]:
        """The tokens that the cycle added to the text: accepted drafts, then the bonus token."""
        drafts = tuple(self.tokens[node] for node in self.accepted)
        return drafts if self.bonus_token is None else (*drafts, self.bonus_token)

    @property
    def above(self) -> tuple[int, ...]:
        """The node above each node, and above the bonus token, if there is one."""
        last_accepted = self.accepted[-1] if self.accepted else 0
        return self.parents if self.bonus_token is None else (*self.parents, last_accepted)

    @property
    def expected_accepted(self) -> float:
        """The sum of the path probabilities: of a chain, `sum_k prod_{i<=k} p_i`, as in Gumiho's paper."""
        return sum(self.path_probability(node) for node in range(1, len(self.tokens)))

    @property
    def summary(self) -> str:
        """How many tokens were drafted, accepted and committed, in words."""
        return (
            f"{len(self.tokens) - 1} tokens drafted, {len(self.accepted)} accepted ({self.expected_accepted:.2f} were "
            f"expected, the sum of the path probabilities), {len(self.committed)} committed"
        )

    def path_probability(self, node: int) -> float:
        """The probability of all tokens from the root down to `node`."""
        return math.exp(self.scores[node])

    def token_probability(self, node: int) -> float:
        """The probability of the token of `node` after the tokens above it."""
        above = self.scores[self.parents[node]]
        return math.exp(self.scores[node] - above) if math.isfinite(above) else 0.0

    def children(self, node: int) -> list[int]:
        """The children of `node`, the best first; the bonus token is the last one."""
        return [child for child, above in enumerate(self.above) if above == node and child]


def watch_cycles(on_cycle: Callable[[Cycle], None]) -> AbstractContextManager[None]:
    """
    In a `with` block, calls `on_cycle` after each verification cycle of this thread's generations. `generate()` raises
    `ValueError` for a batch of several sequences.
    """
    return observing(_CycleWatcher(on_cycle))


class _CycleWatcher(GenerationObserver):
    def __init__(self, watch: Callable[[Cycle], None]):
        self._watch, self._origin = watch, DraftOrigin("drafter")

    def on_generation_begin(self, batch_size: int) -> None:
        if batch_size != 1:
            raise UserValueError(f"Cycles of one sequence can be watched, got a batch of {batch_size}.")

    def on_tree(self, origin: DraftOrigin) -> None:
        self._origin = origin

    def on_cycle(self, tree: DraftTree, path: Path) -> None:
        accepted = path.nodes[0, 1:].tolist()
        # A text that ends within a drafted path ends with a draft, and there is no bonus token.
        child, is_drafted = find_children(tree, path.nodes[:, -1:], path.tokens[:, -1:])
        if is_drafted:
            accepted.append(int(child))
        tokens, parents, scores = (tuple(values[0].tolist()) for values in (tree.tokens, tree.parents, tree.scores))
        bonus_token = None if is_drafted else int(path.tokens[0, -1])
        self._watch(Cycle(tokens, parents, scores, tuple(accepted), bonus_token, self._origin))


@dataclass(frozen=True)
class CycleLabels:
    """The end of the text before the root, and the text of each node and of the bonus token, in quotes."""

    context: str
    nodes: tuple[str, ...]


def label_cycle(tokenizer: PreTrainedTokenizerBase, committed: Sequence[int], cycle: Cycle) -> CycleLabels:
    """Returns the texts of a cycle's tokens after the `committed` ones, whose last one is the root."""
    before = list(committed[-CONTEXT:-1])
    tokens = cycle.tokens if cycle.bonus_token is None else (*cycle.tokens, cycle.bonus_token)
    paths: list[list[int]] = []
    for node, token in enumerate(tokens):
        paths.append([*(before if node == 0 else paths[cycle.above[node]]), token])
    context = shorten(repr(tokenizer.decode(before)), 2 * _LONGEST, keeps_end=True)
    return CycleLabels(context, tuple(_label(tokenizer, path[:-1], path[-1]) for path in paths))


def _label(tokenizer: PreTrainedTokenizerBase, before: list[int], token: int) -> str:
    """Returns the text that a token adds, or its name where that is not a complete character."""
    start, longer = tokenizer.decode(before), tokenizer.decode([*before, token])
    text = longer[len(start) :]
    if not longer.startswith(start) or not text or INCOMPLETE in text:
        return f"<{tokenizer.convert_ids_to_tokens(token)}>"
    return shorten(repr(text), _LONGEST)


def shorten(text: str, length: int, keeps_end: bool = False) -> str:
    """Returns a text of at most `length` characters, cut at its end or its beginning."""
    if len(text) <= length:
        return text
    return f"…{text[1 - length :]}" if keeps_end else f"{text[: length - 1]}…"
