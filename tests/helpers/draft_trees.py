"""The draft trees of a generation, and reading them node by node."""

from transformers_gumiho.generation.observers import GenerationObserver
from transformers_gumiho.generation.tree.draft_tree import DraftTree
from transformers_gumiho.generation.tree.walk import AcceptedPath


class Trees(GenerationObserver):
    """Keeps the tree of every cycle."""

    def __init__(self) -> None:
        self.trees: list[DraftTree] = []

    def on_cycle(self, tree: DraftTree, path: AcceptedPath) -> None:
        self.trees.append(tree)


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
