"""Full Tree Attention's recombinations where a token's probability depends on the token above it.

Then a path may be better than one with more likely tokens in all places, so that the paths which can be among the best
cannot be enumerated beforehand. They are searched depth by depth: a beam as wide as the tree holds every node that can
be among the tree's, as no node scores above its parent.
"""

from dataclasses import dataclass, replace

import torch

from .draft_tree import DraftLevel, extend_level, gather_rows


@dataclass(frozen=True)
class ConditionalCandidates:
    """
    The candidate tokens of the parallel heads. `P` serial paths are extended, each head has `M` candidates for each.

    Attributes:
        tokens (`(B, heads, P, M)`): Candidate tokens.
        first (`(B, P, M)`): Draft log-probabilities of the first head's, under the serial paths.
        following (`(B, heads - 1, P, M, M)`): Those of each further head's; `[b, i, p, a, c]` is that of candidate c
            of head i + 1 under candidate a of head i.
    """

    tokens: torch.Tensor
    first: torch.Tensor
    following: torch.Tensor

    def grow(self, last_level: DraftLevel, num_nodes: int, beam: int, width: int) -> list[DraftLevel]:
        """
        Returns the levels below the last serial one.

        Args:
            last_level: The last serial level, of which the first `P` nodes are extended.
            num_nodes: Nodes of each level, at most.
            beam: Nodes of a level that are extended, at most.
            width: Tokens by which each of them is extended, at most.
        """
        batch_size, num_heads, num_paths, num_candidates = self.tokens.shape
        # A candidate's index counts those of all paths, so it identifies the path, too.
        own_places = torch.arange(num_paths * num_candidates, device=self.tokens.device)
        own_places = own_places.view(1, num_paths, num_candidates).expand(batch_size, -1, -1)
        log_probs, places = self.first, own_places
        level, levels = last_level.first(num_paths), []
        for head in range(num_heads):
            if width < num_candidates:
                log_probs, best = log_probs.topk(width)
                places = places.gather(2, best)
            found = extend_level(level, places, log_probs, num_nodes)
            levels.append(replace(found, tokens=self.tokens[:, head].flatten(1).gather(1, found.tokens)))
            if head + 1 < num_heads:
                level, rows = levels[-1].first(beam), found.tokens[:, :beam]
                log_probs = gather_rows(self.following[:, head].flatten(1, 2), rows)
                places = gather_rows(own_places, rows // num_candidates)
        return levels


def condition(log_probs: torch.Tensor, moves: torch.Tensor) -> torch.Tensor:
    """
    Returns the log-probabilities `(..., M)` of candidates whose logits are moved, those of all other tokens being as
    before.

    Args:
        log_probs: Those before; can be broadcast to `moves`.
        moves (`(..., M)`): What is added to the logits.
    """
    others = torch.log1p(-log_probs.exp().sum(dim=-1, keepdim=True).clamp(max=1.0))
    moved = log_probs + moves
    normalizers = torch.cat((moved, others.expand(*moved.shape[:-1], 1)), dim=-1).logsumexp(dim=-1, keepdim=True)
    # Neither rounding nor an overflow in the drafter may lift a node above its parent.
    return (moved - normalizers).clamp_(max=0.0).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
