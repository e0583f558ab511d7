"""Draft trees as tensors: growing them level by level, choosing their best nodes, and their attention masks.

Pure functions of fixed-shape tensors with the batch dimension first. `B` batch size, `N` drafted nodes.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn


Value = TypeVar("Value", bound=Any)  # a dataclass


@dataclass(frozen=True)
class DraftLevel:
    """
    The candidate nodes of one depth, best first.

    Attributes:
        tokens (`(B, n)`): Drafted token ids.
        scores (`(B, n)`): Summed draft log-probabilities (nats) of the paths that end here.
        parents (`(B, n)`): Index of each node's parent in the level above (0 in the first level: the root).
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor

    def first(self, num_nodes: int) -> "DraftLevel":
        """Returns the `num_nodes` best nodes (all of them if there are fewer)."""
        if num_nodes >= self.tokens.shape[1]:
            return self
        return DraftLevel(self.tokens[:, :num_nodes], self.scores[:, :num_nodes], self.parents[:, :num_nodes])


@dataclass(frozen=True)
class DraftTree:
    """
    A tree of drafted tokens under a root, the newest committed token. Parents come before their children.

    Attributes:
        tokens (`(B, N + 1)`): Token ids; the root's first.
        parents (`(B, N + 1)`): Index of each node's parent; the root is its own.
        depths (`(B, N + 1)`): Distance to the root.
        scores (`(B, N + 1)`): Summed draft log-probabilities (nats) of the paths that end here, 0 for the root. They
            rank the nodes, under the draft temperatures and, when sampling, the noise of the coming draws. Those of
            prompt-lookup tokens are estimates.
        ancestors (`(B, N + 1, N + 1)`, bool): `[b, i, j]` is true where node j is node i or an ancestor of it.
        max_depth (`int`): No path is longer than this.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    scores: torch.Tensor
    ancestors: torch.Tensor
    max_depth: int

    def to(self, device: torch.device) -> "DraftTree":
        """Returns the tree on `device`."""
        return self if self.tokens.device == device else map_tensors(self, lambda tensor: tensor.to(device))

    def clone(self) -> "DraftTree":
        """Returns a copy in memory of its own."""
        return map_tensors(self, torch.clone)


def map_tensors(value: Value, function: Callable[[torch.Tensor], torch.Tensor]) -> Value:
    """Returns a dataclass with each of its tensors mapped."""
    tensors = {name: own for name, own in vars(value).items() if isinstance(own, torch.Tensor)}
    return replace(value, **{name: function(own) for name, own in tensors.items()})


def extend_level(
    level: DraftLevel | None, tokens: torch.Tensor, log_probs: torch.Tensor, num_nodes: int
) -> DraftLevel:
    """
    Extends each of the `n` nodes of `level`, or the root (`None`, `n` is 1), by its candidate tokens `(B, n, M)`,
    distinct for a node, with their draft log-probabilities `(B, n, M)`. Keeps the best `num_nodes` of the extensions.
    """
    num_candidates = tokens.shape[2]
    if level is not None:
        log_probs = level.scores[:, :, None] + log_probs
    scores = log_probs.flatten(1)
    scores, order = scores.topk(min(num_nodes, scores.shape[1]))
    return DraftLevel(tokens.flatten(1).gather(1, order), scores, order // num_candidates)


def bare_root(root_tokens: torch.Tensor) -> DraftTree:
    """Returns the tree of the root alone, with `root_tokens` `(B,)`."""
    nothing = torch.zeros(len(root_tokens), 0, dtype=torch.long, device=root_tokens.device)
    return single_path(root_tokens, nothing, nothing.float())


def single_path(root_tokens: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor) -> DraftTree:
    """
    Returns the tree that is one path in each row: under `root_tokens` `(B,)` the `tokens` `(B, M)` from depth 1 down,
    with the summed log-probabilities (nats) of the paths that end at them as `scores` `(B, M)`.
    """
    shape, device = (len(tokens), tokens.shape[1] + 1), tokens.device
    depths = torch.arange(shape[1], device=device).repeat(shape[0], 1)
    return DraftTree(
        tokens=torch.cat((root_tokens[:, None].to(tokens), tokens), dim=1),
        parents=(depths - 1).clamp(min=0),
        depths=depths,
        scores=nn.functional.pad(scores, (1, 0)),
        ancestors=depths[:, :, None] >= depths[:, None, :],
        max_depth=tokens.shape[1],
    )


def padded_root(root_tokens: torch.Tensor, num_unused: int, max_depth: int) -> DraftTree:
    """
    Returns the roots `(B,)` with `num_unused` nodes that are no drafts, where all trees must have the same shapes: a
    path of tokens 0 with scores of minus infinity. Where the target happens to choose such a token, it is accepted as
    any draft is. Nodes below `max_depth`, that of the other trees, are never reached; they have its position.
    """
    unused = torch.zeros(len(root_tokens), num_unused, dtype=torch.long, device=root_tokens.device)
    tree = single_path(root_tokens, unused, torch.full_like(unused, -torch.inf, dtype=torch.float32))
    return replace(tree, depths=tree.depths.clamp(max=max_depth), max_depth=max_depth)


def build_tree(
    root_tokens: torch.Tensor,
    levels: Sequence[DraftLevel],
    num_nodes: int,
    max_depth: int,
    token_ids: torch.Tensor | None = None,
) -> DraftTree:
    """
    Builds the tree of the best `num_nodes` nodes of all levels (of all their nodes if there are fewer).

    Log-probabilities are never positive, so no node scores above its parent; among equals the shallower comes first
    (the sort is stable). The choice therefore always holds the parents of the nodes it holds.

    Args:
        root_tokens (`(B,)`): The newest committed tokens.
        levels: The levels from depth 1 down.
        num_nodes: The most drafted nodes of the tree.
        max_depth: No path of the levels is longer.
        token_ids (`(K,)`, *optional*): Ids of the tokens, if the levels hold indices from 0 to `K - 1` instead of ids.
    """
    tokens, scores = [level.tokens for level in levels], [level.scores for level in levels]
    if token_ids is not None:
        tokens = [token_ids.to(root_tokens.device)[torch.cat(tokens, dim=1)]]
    # The root is the first candidate, and scores 0. In the first level all parents are 0: the root, which is its own.
    starts = itertools.accumulate([1, *(level.tokens.shape[1] for level in levels)])
    parents = [level.parents + start for level, start in zip(levels[1:], starts, strict=False)]
    first_parents = levels[0].parents
    return choose_nodes(
        tokens=torch.cat([root_tokens[:, None], *tokens], dim=1),
        scores=nn.functional.pad(torch.cat(scores, dim=1), (1, 0)),
        parents=torch.cat([first_parents[:, :1], first_parents, *parents], dim=1),
        num_nodes=num_nodes,
        max_depth=max_depth,
    )


def choose_nodes(
    tokens: torch.Tensor, scores: torch.Tensor, parents: torch.Tensor, num_nodes: int, max_depth: int
) -> DraftTree:
    """
    Returns the tree of a root and its best `num_nodes` descendants, of `n` candidates of which the root is the first.

    Args:
        tokens (`(B, n)`): The tokens of the candidates.
        scores (`(B, n)`): Their scores, none better than that of the parent. Among equals the parent comes first.
        parents (`(B, n)`): For each the candidate that is its parent.
        num_nodes, max_depth: The most drafted nodes of the tree, and of a path.
    """
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    chosen = order[:, : num_nodes + 1]
    # The index of every candidate in the tree; the root is the first in order, too.
    indices = torch.arange(order.shape[1], device=order.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(1, order, indices)
    tree_parents = ranks.gather(1, parents.gather(1, chosen))
    ancestors = find_ancestors(tree_parents, max_depth)
    return DraftTree(
        tokens=tokens.gather(1, chosen),
        parents=tree_parents,
        depths=ancestors.sum(dim=2) - 1,
        scores=scores[:, : num_nodes + 1],
        ancestors=ancestors,
        max_depth=max_depth,
    )


def limit_depth(tree: DraftTree, max_depth: int, is_path: bool) -> DraftTree:
    """
    Returns the tree without its nodes below `max_depth`; all rows keep as many as the row with the most above it. In
    chains (`is_path`) that is their depth.

    Nodes below it that remain come last. No walk reaches them; they have the position of `max_depth`. On an
    accelerator all of a tree's remain, because the host would have to wait for their number.
    """
    if tree.max_depth <= max_depth:
        return tree
    is_below, num_kept = tree.depths > max_depth, tree.tokens.shape[1]
    if is_path:
        num_kept = min(max_depth + 1, num_kept)
    elif is_below.device.type == "cpu":
        num_kept -= int(is_below.sum(dim=1).min())
    limited = choose_nodes(
        tree.tokens, tree.scores.masked_fill(is_below, -torch.inf), tree.parents, num_kept - 1, tree.max_depth
    )
    return replace(limited, depths=limited.depths.clamp(max=max_depth), max_depth=max_depth)


def find_ancestors(parents: torch.Tensor, max_depth: int) -> torch.Tensor:
    """
    Returns `(B, n, n)`: whether node j is node i or an ancestor of it, for parents `(B, n)` whose root is its own.

    With `A` the matrix that takes a node to itself and to its parent, `A^(2^k)` reaches ancestors up to `2^k` above.
    """
    num_nodes = parents.shape[1]
    reach = torch.eye(num_nodes, dtype=torch.float32, device=parents.device).expand(parents.shape[0], -1, -1)
    reach = reach.scatter(2, parents[:, :, None], 1.0)
    distance = 1
    while distance < max_depth:
        if distance >= 8:
            # The entries count ways, up to 2^distance of them, and under autocast they are float16.
            reach = reach.clamp(max=1.0)
        reach = torch.bmm(reach, reach)
        distance *= 2
    return reach > 0


def gather_rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Picks `rows` `(B, m)` from the second dimension of `tensor` `(B, n, width)`."""
    if tensor.shape[1] == 1:
        return tensor.expand(-1, rows.shape[1], -1)
    return tensor.gather(1, rows[:, :, None].expand(-1, -1, tensor.shape[2]))


def tree_attention_mask(
    visible: torch.Tensor,
    depths: torch.Tensor,
    starts: int | torch.Tensor,
    num_slots: int,
    dtype: torch.dtype,
    context_mask: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """
    Returns the attention mask of a block of new tokens that follow a committed context of its own length in each row.

    Args:
        visible (`(B, Q, n)`, bool): Which of the `n` newest slots each of the `Q` queries sees.
        depths (`(B, n)`): Position of each of the newest slots relative to the first of them. The queries are the last
            `Q` of the slots.
        starts: Committed slots of each row, `(B, 1)`, or their number in all rows. The newest slots follow them.
        num_slots: Slots of the mask, at least `max(starts) + n`. No query sees those after the newest ones.
        dtype: Dtype of the attention scores, or `torch.bool`.
        context_mask (`(B, T)`, bool, *optional*): False at committed slots that no query sees (padding). It has a
            number for each of them.
        window (`int`, *optional*): A query sees slots less than this many positions before it. Unlimited by default.

    Returns:
        `(B, 1, Q, num_slots)`: 0 where a query sees a slot, the dtype's minimum where it does not; or true and false.
        `sdpa` and eager attention add a float mask, and eager attention misreads a bool one.
    """
    batch_size, num_queries, num_new = visible.shape
    query_depths = depths[:, -num_queries:]
    if window is not None:
        visible = visible & (query_depths[:, :, None] - depths[:, None, :] < window)
    # 1. Every query sees the context, except for padding and what is before the window.
    slots = torch.arange(num_slots, device=visible.device)
    in_context = (slots < starts).expand(batch_size, -1)
    if context_mask is not None:
        in_context = in_context & nn.functional.pad(context_mask, (0, num_slots - context_mask.shape[1]))
    seen = in_context[:, None].repeat(1, num_queries, 1)
    if window is not None:
        seen &= slots > (starts + query_depths - window)[:, :, None]
    # 2. The newest slots follow the context of each row.
    newest = (starts + slots[:num_new]).expand(batch_size, -1)
    seen.scatter_(2, newest[:, None].expand(-1, num_queries, -1), visible)
    if dtype is torch.bool:
        return seen[:, None]
    hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return hidden.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
