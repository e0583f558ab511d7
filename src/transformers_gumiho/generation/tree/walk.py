"""Walking a draft tree from its root along the tokens that the target chooses, the same way at every temperature."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .draft_tree import DraftTree


@dataclass(frozen=True)
class Walk:
    """
    The walk through a draft tree, all of it on the device. `L` is the longest possible one: the tree's depth + 1.

    Attributes:
        nodes (`(B, L)`): Tree indices of the visited nodes from the root (index 0) down; past the end any index.
        packed (`(B, 1 + L)`): The counts, then the tokens: one tensor, because the host reads both.
    """

    nodes: torch.Tensor
    packed: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """`(B,)`: Number of visited nodes."""
        return self.packed[:, 0]

    @property
    def tokens(self) -> torch.Tensor:
        """`(B, L)`: The token chosen at each visited node: accepted drafts, the last one the bonus token."""
        return self.packed[:, 1:]


@dataclass(frozen=True)
class AcceptedPath:
    """
    The part of a walk that a cycle commits: it ends where the text of its row does.

    Attributes:
        nodes (`(B, L)`): Tree indices of the visited nodes from the root (index 0) down; past the end any index.
        tokens (`(B, L)`): The token chosen at each visited node; past the end any token.
        accepted_lengths: For each row the tokens that are committed, one per visited node; 0 where it has ended.
    """

    nodes: torch.Tensor
    tokens: torch.Tensor
    accepted_lengths: list[int]

    @classmethod
    def join(cls, parts: Sequence["AcceptedPath"]) -> "AcceptedPath":
        """Returns consecutive parts of a path as one. A row that has ended its path has ended it in later parts."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.nodes for part in parts], dim=1),
            torch.cat([part.tokens for part in parts], dim=1),
            [sum(lengths) for lengths in zip(*(part.accepted_lengths for part in parts), strict=True)],
        )

    def padded(self, width: int) -> "AcceptedPath":
        """Returns a copy with at least `width` columns."""
        missing = max(width - self.nodes.shape[1], 0)
        nodes, tokens = (torch.nn.functional.pad(tensor, (0, missing)) for tensor in (self.nodes, self.tokens))
        return AcceptedPath(nodes, tokens, self.accepted_lengths)


def longest_path(tree: DraftTree) -> int:
    """Returns the most nodes that a path of `tree` can have, root included."""
    return min(tree.max_depth + 1, tree.tokens.shape[1])


def walk_tree(tree: DraftTree, choices: torch.Tensor) -> Walk:
    """Walks the tree at once, by the tokens `choices` `(B, N + 1)` that the target chooses after each node."""
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
    packed = torch.cat((counts, choices.gather(1, nodes)), dim=1)
    return Walk(nodes, packed)


class ChildFinder:
    """Finds the children of a tree's nodes by the tokens they carry."""

    def __init__(self, tree: DraftTree):
        self._keys = _keys(tree.parents, tree.tokens)
        self._keys[:, 0].fill_(-1)  # the root is its own parent

    def find(self, nodes: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Looks for the children of `nodes` `(B, 1)` that carry `tokens` `(B, 1)`. Returns their indices `(B, 1)`, any
        node where there is none, and whether there is one `(B, 1)`.
        """
        found, children = (self._keys == _keys(nodes, tokens)).max(dim=1, keepdim=True)
        return children, found


def _keys(nodes: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns one number for each pair of a node and a token."""
    return torch.add(tokens, nodes, alpha=1 << 32)


def pick(values: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """Picks the values `(B, N + 1, width)` of `nodes` `(B, L)`."""
    return values.gather(1, nodes.to(values.device)[:, :, None].expand(-1, -1, values.shape[2]))
