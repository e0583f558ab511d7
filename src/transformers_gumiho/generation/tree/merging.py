"""Merging a tree with one more path under its root, such as a prompt-lookup draft."""

from dataclasses import replace

import torch
from torch import nn

from .draft_tree import DraftTree, choose_nodes


def merge_branch(tree: DraftTree, tokens: torch.Tensor, scores: torch.Tensor) -> DraftTree:
    """
    Returns the best nodes of `tree` and of a branch, as many as `tree` has. A token that both have after the same path
    is one node, with the better of the two scores.

    Args:
        tokens (`(B, M)`): The branch, from depth 1 down.
        scores (`(B, M)`): The summed log-probabilities (nats) down to each of its tokens. Never rising; minus infinity
            from where the branch of a row has ended.
    """
    num_nodes, length = tree.tokens.shape[1], tokens.shape[1]
    shared = _shared_nodes(tree, tokens)
    is_shared = shared >= 0
    branch_scores = _branch_scores(tree, shared, scores)
    # Nodes of the tree that are also on the branch get their score there, if it is better.
    tree_scores = tree.scores.scatter(1, shared.clamp(min=0), branch_scores.where(is_shared, 0.0))
    tree_scores = tree_scores.maximum(tree.scores)
    tree_scores[:, 0] = 0.0
    # A shared node is no second candidate: it ranks after the tree, which has as many nodes as are chosen.
    new_scores = branch_scores.masked_fill(is_shared, -torch.inf)
    own = torch.arange(num_nodes, num_nodes + length, device=tokens.device)
    indices = shared.where(is_shared, own)
    parents = torch.cat((torch.zeros_like(indices[:, :1]), indices[:, :-1]), dim=1)
    return choose_nodes(
        tokens=torch.cat((tree.tokens, tokens), dim=1),
        scores=torch.cat((tree_scores, new_scores), dim=1),
        parents=torch.cat((tree.parents, parents), dim=1),
        num_nodes=num_nodes - 1,
        max_depth=max(tree.max_depth, min(length, num_nodes - 1)),
    )


def take_better_chain(tree: DraftTree, tokens: torch.Tensor, scores: torch.Tensor) -> DraftTree:
    """
    Returns for each row the chain, or one that begins with the branch if more of its tokens are expected to be
    accepted. The chain's last tokens follow a shorter branch. The arguments are those of [`merge_branch`].
    """
    length = min(tokens.shape[1], tree.tokens.shape[1] - 1)
    tokens, scores = tokens[:, :length], scores[:, :length]
    own_tokens, own_scores = tree.tokens[:, 1:], tree.scores[:, 1:]
    branch_scores = _branch_scores(tree, _shared_nodes(tree, tokens), scores)
    # 1. Where the two part. Chain 5 8 2 7 and branch 5 8 9: `agreed` is 1 1 0, and `fork` is 2, the depth of the 8.
    agreed = (own_tokens[:, :length] == tokens).cumprod(dim=1)
    fork = agreed.sum(dim=1, keepdim=True)
    # 2. The common beginning is as likely in the chain as in the branch, so what follows it there gains as much.
    score_at_fork = nn.functional.pad(branch_scores, (1, 0)).gather(1, fork)
    score_gain = score_at_fork - tree.scores.gather(1, fork)
    chain_scores = (own_scores + score_gain.nan_to_num_(nan=0.0)).clamp(max=0.0)
    chain_scores[:, :length] = branch_scores.where(agreed.bool(), chain_scores[:, :length])
    # 3. The sum of the probabilities of all tokens is the number that is expected to be accepted.
    of_branch = branch_scores.exp().sum(dim=1, keepdim=True)
    is_better = of_branch > chain_scores.exp().sum(dim=1, keepdim=True)
    # 4. A better branch 5 8 9 takes the first places, and the chain's last token stays behind it: 5 8 9 7.
    missing = own_tokens.shape[1] - length
    taken = nn.functional.pad(is_better & (scores > -torch.inf), (0, missing))
    new_tokens = nn.functional.pad(tokens, (0, missing)).where(taken, own_tokens)
    new_scores = nn.functional.pad(branch_scores, (0, missing)).where(taken, chain_scores)
    return replace(
        tree,
        tokens=torch.cat((tree.tokens[:, :1], new_tokens), dim=1),
        scores=torch.cat((tree.scores[:, :1], new_scores.cummin(dim=1).values), dim=1),
    )


def _shared_nodes(tree: DraftTree, tokens: torch.Tensor) -> torch.Tensor:
    """Returns `(B, M)`: for each token of the branch the node of `tree` that it shares, -1 without one."""
    length = tokens.shape[1]
    # No depth of the tree beyond the branch agrees with a token of it.
    padded = nn.functional.pad(tokens, (1, 1), value=-1)
    agreed = tree.tokens == padded.gather(1, tree.depths.clamp(max=length + 1))
    agreed[:, 0] = True
    on_branch = (tree.ancestors <= agreed[:, None]).all(dim=-1)
    indices = torch.arange(tree.tokens.shape[1], device=tokens.device).expand_as(tree.tokens)
    shared = torch.full((len(tokens), length + 2), -1, device=tokens.device)
    # What is not on it goes to an unused column: no two nodes of the branch have one depth.
    depths = tree.depths.where(on_branch, length + 1)
    return shared.scatter(1, depths, indices)[:, 1:-1]


def _branch_scores(tree: DraftTree, shared: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Returns the scores `(B, M)` of a branch's tokens, or those of the shared nodes where they are better."""
    own = tree.scores.gather(1, shared.clamp(min=0)).masked_fill(shared < 0, -torch.inf)
    ended = scores == -torch.inf
    sums = scores.to(own.dtype).masked_fill(ended, 0.0)
    # From a shared node j on: `own_j + sums_d - sums_j`, the best of all j from the root, which scores 0, down to d.
    best = nn.functional.pad(own - sums, (1, 0)).cummax(dim=1).values[:, 1:] + sums
    # By rounding, a token may score above the one that it follows.
    return own.where(ended, best.clamp(max=0.0)).cummin(dim=1).values
