"""Walking a draft tree from its root along the tokens that the target chooses, the same way at every temperature."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .draft_tree import DraftTree


@dataclass(frozen=True)
class Path:
    """
    A path down a draft tree in each row: the nodes that the target agrees with, and the bonus token. What is committed
    of it ends where the text of its row does. It can be one step of a longer path.

    Attributes:
        nodes (`(B, L)`): Tree indices of the visited nodes from the root (index 0) down; past the end any index.
        tokens (`(B, L)`): The token chosen at each visited node: accepted drafts, the last one the bonus token; past
            the end any token.
        host_tokens: The tokens of each row on the host, without those past the end.
        logits (`(B, L, V)`, *optional*): The target's logits at the nodes, where they are recorded.
        scores (`(B, L, V)`, *optional*): The processed logits, likewise.
    """

    nodes: torch.Tensor
    tokens: torch.Tensor
    host_tokens: Sequence[Sequence[int]]
    logits: torch.Tensor | None = None
    scores: torch.Tensor | None = None

    @cached_property
    def accepted_lengths(self) -> list[int]:
        """The number of tokens in each row, one per visited node; 0 in a row that has ended."""
        return [len(row) for row in self.host_tokens]

    @classmethod
    def join(cls, steps: Sequence["Path"]) -> "Path":
        """Returns consecutive parts of a path as one. A row that has ended its path has ended it in later parts."""
        if len(steps) == 1:
            return steps[0]
        rows = zip(*(step.host_tokens for step in steps), strict=True)
        return cls(
            torch.cat([step.nodes for step in steps], dim=1),
            torch.cat([step.tokens for step in steps], dim=1),
            [[*itertools.chain(*parts)] for parts in rows],
        )

    def cut(self, lengths: Sequence[int]) -> "Path":
        """Returns the first `lengths[b]` tokens of each row, without recorded values."""
        if lengths == self.accepted_lengths:
            return self
        rows = zip(self.host_tokens, lengths, strict=True)
        return Path(self.nodes, self.tokens, [tokens[:length] for tokens, length in rows])

    def padded(self, width: int) -> "Path":
        """Returns a copy with at least `width` columns."""
        missing = max(width - self.nodes.shape[1], 0)
        nodes = torch.nn.functional.pad(self.nodes, (0, missing))
        tokens = torch.nn.functional.pad(self.tokens, (0, missing))
        return Path(nodes, tokens, self.host_tokens)


def longest_path(tree: DraftTree) -> int:
    """Returns the most nodes that a path of `tree` can have, root included."""
    return min(tree.max_depth + 1, tree.tokens.shape[1])


def walk_tree(tree: DraftTree, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Walks the tree at once, by the tokens `choices` `(B, N + 1)` that the target chooses after each node.

    Returns:
        The visited nodes `(B, L)` of a [`Path`]; `L` is the depth of the tree + 1. And `(B, 1 + L)`: their number in
        each row, then the tokens chosen at them. That is one tensor, because the host reads both.
    """
    # A draft is accepted if it is the token that the target chooses at its parent, and all drafts above are accepted.
    # The token chosen at the last accepted node is the bonus token. So the committed tokens are those that plain
    # decoding chooses, one after the other.
    agreed = tree.tokens == choices.gather(1, tree.parents)
    agreed[:, 0].fill_(True)
    # Being an ancestor implies agreement: `<=` of truth values.
    visited = (tree.ancestors <= agreed[:, None]).all(dim=-1)
    # Nodes come after their parents, so the visited indices in increasing order are the path. At most one child of a
    # node is visited, as siblings differ.
    nodes = visited.sort(dim=1, descending=True, stable=True).indices[:, : longest_path(tree)]
    # Below the tree's depth nothing counts.
    counts = visited.sum(dim=1, keepdim=True).clamp(max=nodes.shape[1])
    return nodes, torch.cat((counts, choices.gather(1, nodes)), dim=1)


def find_children(tree: DraftTree, nodes: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Looks for the children of `nodes` `(B, 1)` that carry `tokens` `(B, 1)`. Returns their indices `(B, 1)`, any node
    where there is none, and whether there is one `(B, 1)`.
    """
    is_child = (tree.parents == nodes) & (tree.tokens == tokens)
    is_child[:, 0].fill_(False)  # the root is its own parent
    found, children = is_child.max(dim=1, keepdim=True)
    return children, found


def pick(values: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """Picks the values `(B, N + 1, width)` of `nodes` `(B, L)`."""
    return values.gather(1, nodes.to(values.device)[:, :, None].expand(-1, -1, values.shape[2]))
