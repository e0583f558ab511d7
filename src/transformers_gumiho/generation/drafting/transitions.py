"""
The parallel heads' transitions in drafting: for pairs of candidate tokens alone.

With transitions a token's probability depends on the token above it. A path may then be better than one with more
likely tokens at all depths, so Full Tree Attention's recombinations are searched depth by depth. A beam as wide as the
tree holds every node that can be in the tree, as no node scores above its parent.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad

from ...model.modeling_gumiho import GumihoModel
from ..tree.draft_tree import DraftLevel, extend_level, gather_rows
from ..verification.target_memory import StaticMemory, memory_of
from ..verification.target_states import is_plain_linear


# The output head gets a small multiple of each direction, because it may cap its logits.
_STEP = 1 / 16


class DraftTransitions:
    """
    What the token above a parallel head's draft adds to the draft's logit, as two tables over the `K` tokens that may
    be drafted: the product of one row of each. They are kept while the weights stay the same. `num_heads` heads draft;
    `memory` is given if captured graphs read the tables.
    """

    def __init__(
        self,
        model: GumihoModel,
        num_heads: int,
        lm_head: Callable[[torch.Tensor], torch.Tensor],
        token_ids: torch.Tensor | None,
        head_module: nn.Module | None = None,
        memory: StaticMemory | None = None,
    ):
        heads: list[Any] = list(model.transition or ())[:num_heads]
        embedding = model.embed_tokens.weight.detach()

        def make() -> list[torch.Tensor]:
            drafted = embedding
            if token_ids is not None:
                drafted = embedding[token_ids.to(embedding.device)]
            up = torch.stack([head.up.detach() for head in heads])
            up = up.transpose(1, 2) * _STEP  # (heads, rank, H)
            # The output head is linear, but for its bias.
            bias = lm_head(torch.zeros_like(up[:1, :1]))
            below = (lm_head(up) - bias) / _STEP
            above = [linear(drafted.to(head.down), head.down.detach()) for head in heads]
            # (heads, K, rank) both
            return [torch.stack(above).to(below), below.transpose(1, 2).contiguous()]

        if head_module is not None and is_plain_linear(head_module):
            weights = [parameter for head in heads for parameter in head.parameters()]
            weights = [embedding, *weights, *head_module.parameters()]
            key = (num_heads, token_ids)
            tables = memory_of(head_module).derive("transitions", model, weights, key, make)
        else:
            tables = make() if memory is None else [memory.copy(table) for table in make()]
        self.above, self.below = tables
        self._heads = torch.arange(num_heads, device=self.below.device)[:, None, None]

    def apply(
        self, serial_tokens: torch.Tensor, tokens: torch.Tensor, log_probs: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """
        Returns the log-probabilities `(B, heads, P, M, M)` of candidates: `[b, i, p, a, c]` is that of candidate c of
        head i under candidate a of the head above. The first head reads the serial token instead, for every a.

        Args:
            serial_tokens (`(B, P)`): The last token of each serial path, as an index from 0 to `K - 1`.
            tokens (`(B, heads, P, M)`), log_probs: The candidates, as such indices, and what the heads alone say.
            scales (`(heads, 1, 1, 1)`): Factors of the logits of each head.
        """
        first = serial_tokens[:, None, :, None].expand(-1, 1, -1, tokens.shape[3])
        heads = self._heads[: tokens.shape[1]]
        above = self.above[heads, torch.cat((first, tokens[:, :-1]), dim=1)].float()
        below = self.below[heads, tokens].float()  # (B, heads, P, M, rank)
        return condition(log_probs, above @ below.transpose(-1, -2) * scales)


def extend_paths(
    last_level: DraftLevel, tokens: torch.Tensor, log_probs: torch.Tensor, num_nodes: int, beam: int
) -> list[DraftLevel]:
    """
    Returns the levels below the last serial one. Its first `P` nodes are extended; each parallel head has `M`
    candidates for each of them.

    Args:
        last_level: The last serial level.
        tokens (`(B, heads, P, M)`): The candidates.
        log_probs (`(B, heads, P, M, M)`): Of each candidate under each one above, as [`DraftTransitions.apply`] says.
        num_nodes: Most nodes of each level.
        beam: Most nodes of a level that are extended, and most tokens by which each of them is extended.
    """
    batch_size, num_heads, num_paths, num_candidates = tokens.shape
    # 1. An index for each candidate, counted over all heads and paths. With 2 paths and 3 candidates each, the first
    # head has 0 1 2 under path 0 and 3 4 5 under path 1, the second head 6 to 11. Levels hold indices until step 4.
    indices = torch.arange(num_heads * num_paths * num_candidates, device=tokens.device)
    indices = indices.view(1, -1, num_candidates).expand(batch_size, -1, -1)
    level, scores, own = last_level.first(num_paths), log_probs[:, 0, :, 0], indices[:, :num_paths]
    # Those of the later heads, under each candidate and path.
    log_probs = log_probs[:, 1:].flatten(1, 3)
    indices = indices[:, num_paths:]
    levels: list[DraftLevel] = []
    for head in range(num_heads):
        # 2. The best candidates of each node make the level below it.
        if beam < num_candidates:
            scores, best = scores.topk(beam)
            own = own.gather(2, best)
        levels.append(extend_level(level, own, scores, num_nodes))
        level = levels[-1].first(beam)
        # 3. Candidate 4 is one of path 1: `4 // 3`. The next head's candidates of that path follow, scored after 4.
        if head + 1 < num_heads:
            scores = gather_rows(log_probs, level.tokens)
            own = gather_rows(indices, level.tokens // num_candidates)
    # 4. Tokens in the place of their indices.
    tokens = tokens.flatten(1)
    return [replace(level, tokens=tokens.gather(1, level.tokens)) for level in levels]


def condition(log_probs: torch.Tensor, logit_offsets: torch.Tensor) -> torch.Tensor:
    """
    Returns the log-probabilities `(..., A, M)` of candidates, from those before `(..., M)` and offsets of their logits
    `(..., A, M)` in `A` cases. The logits of all other tokens stay.
    """
    others = torch.log1p(-log_probs.exp().sum(dim=-1, keepdim=True).clamp(max=1.0))
    logits = torch.cat((log_probs, others), dim=-1)[..., None, :]
    logits = logits + pad(logit_offsets, (0, 1))
    # A log-softmax is at most 0, so no node scores above its parent; an overflow makes it NaN.
    found = logits.log_softmax(dim=-1)[..., :-1]
    return found.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
