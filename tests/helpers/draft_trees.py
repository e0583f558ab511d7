"""The draft trees of a generation, and reading them node by node."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from transformers_gumiho.generation.drafting.drafter import GumihoDrafter
from transformers_gumiho.generation.observers import GenerationObserver
from transformers_gumiho.generation.tree.draft_tree import DraftTree
from transformers_gumiho.generation.tree.walk import Path
from transformers_gumiho.generation.verification.session import CommittedTokens


class Trees(GenerationObserver):
    """Keeps the tree of every cycle."""

    def __init__(self) -> None:
        self.trees: list[DraftTree] = []

    def on_cycle(self, tree: DraftTree, path: Path) -> None:
        self.trees.append(tree)


@contextmanager
def recorded_drafts() -> Iterator[list[tuple[CommittedTokens, DraftTree]]]:
    """Yields what will hold, for each cycle, what the drafter reads and the tree that it drafts then."""
    draft, drafts = GumihoDrafter.draft, []

    def recording(self: GumihoDrafter, committed: CommittedTokens) -> DraftTree:
        drafts.append((committed, draft(self, committed)))
        return drafts[-1][1]

    with mock.patch.object(GumihoDrafter, "draft", recording):
        yield drafts


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """Returns the token path of every drafted node, following parents one by one."""
    paths = []
    for node in range(1, tree.tokens.shape[1]):
        path = []
        while node != 0:
            path.append(int(tree.tokens[row, node]))
            node = int(tree.parents[row, node])
        paths.append(tuple(reversed(path)))
    return paths
