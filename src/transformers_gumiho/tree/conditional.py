"""Full Tree Attention's recombinations where a token's probability depends on the token above it.

Then a path may be better than one with more likely tokens at all depths, so the best paths cannot be enumerated
beforehand. They are searched depth by depth: a beam as wide as the tree holds every node that can be in the tree, as
no node scores above its parent.
"""

from dataclasses import replace

import torch
from torch import nn

from .draft_tree import DraftLevel, extend_level, gather_rows


def extend_paths(
    last_level: DraftLevel, tokens: torch.Tensor, log_probs: torch.Tensor, num_nodes: int, beam: int
) -> list[DraftLevel]:
    """
    Returns the levels below the last serial one. Its first `P` nodes are extended; each parallel head has `M`
    candidates for each of them.

    Args:
        last_level: The last serial level.
        tokens (`(B, heads, P, M)`): Candidate tokens.
        log_probs (`(B, heads, P, M, M)`): Their draft log-probabilities: `[b, i, p, a, c]` is that of candidate c of
            head i under candidate a of head i - 1. For the first head, a does not matter.
        num_nodes: Most nodes of each level.
        beam: Most nodes of a level that are extended, and most tokens by which each of them is extended.
    """
    batch_size, num_heads, num_paths, num_candidates = tokens.shape
    # An index for each candidate, counted over all heads and paths.
    indices = torch.arange(num_heads * num_paths * num_candidates, device=tokens.device)
    indices = indices.view(1, -1, num_candidates).expand(batch_size, -1, -1)
    level, scores, own = last_level.first(num_paths), log_probs[:, 0, :, 0], indices[:, :num_paths]
    log_probs, indices = log_probs[:, 1:].flatten(1, 3), indices[:, num_paths:]  # under each candidate and path
    levels: list[DraftLevel] = []
    for head in range(num_heads):
        if beam < num_candidates:
            scores, best = scores.topk(beam)
            own = own.gather(2, best)
        levels.append(extend_level(level, own, scores, num_nodes))
        level = levels[-1].first(beam)
        if head + 1 < num_heads:
            scores = gather_rows(log_probs, level.tokens)
            own = gather_rows(indices, level.tokens // num_candidates)
    sizes = [level.tokens.shape[1] for level in levels]
    found = tokens.flatten(1).gather(1, torch.cat([level.tokens for level in levels], dim=1)).split(sizes, dim=1)
    return [replace(level, tokens=own) for level, own in zip(levels, found, strict=True)]


def condition(log_probs: torch.Tensor, moves: torch.Tensor) -> torch.Tensor:
    """
    Returns the log-probabilities `(..., A, M)` of candidates after their logits have moved; the logits of all other
    tokens stay.

    Args:
        log_probs (`(..., M)`): Log-probabilities before.
        moves (`(..., A, M)`): What is added to the logits, in `A` cases.
    """
    others = torch.log1p(-log_probs.exp().sum(dim=-1, keepdim=True).clamp(max=1.0))
    logits = torch.cat((log_probs, others), dim=-1)[..., None, :] + nn.functional.pad(moves, (0, 1))
    # A log-softmax is at most 0, so no node scores above its parent; an overflow makes it NaN.
    return logits.log_softmax(dim=-1)[..., :-1].nan_to_num(nan=-torch.inf, neginf=-torch.inf)
