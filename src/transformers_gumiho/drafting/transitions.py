"""The parallel heads' transitions in drafting: for pairs of candidate tokens alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from ..model.modeling_gumiho import GumihoModel
from ..tree.conditional import condition
from ..verification.static_memory import StaticMemory


# The output head gets a small multiple of each direction, because it may cap its logits.
_STEP = 1 / 16


class DraftTransitions:
    """
    What the token above a parallel head's draft adds to the draft's logit, as two tables over the `K` tokens that may
    be drafted: the product of one row of each. They are made once per call of `generate()`.

    Args:
        model: A drafter with transitions.
        num_heads: The heads that draft.
        lm_head: As in [`GumihoDrafter`].
        token_ids (`(K,)`, *optional*): As in [`GumihoDrafter`].
        memory: Holds the tables if captured graphs read them.
    """

    def __init__(
        self,
        model: GumihoModel,
        num_heads: int,
        lm_head: Callable[[torch.Tensor], torch.Tensor],
        token_ids: torch.Tensor | None,
        memory: StaticMemory | None = None,
    ):
        heads: list[Any] = list(model.transition or ())[:num_heads]
        embedding = model.embed_tokens.weight.detach()
        drafted = embedding if token_ids is None else embedding[token_ids.to(embedding.device)]
        up = torch.stack([head.up.detach() for head in heads]).transpose(1, 2) * _STEP  # (heads, rank, H)
        # The output head is linear, but for its bias.
        below = (lm_head(up) - lm_head(torch.zeros_like(up[:1, :1]))) / _STEP
        self.below = below.transpose(1, 2).contiguous()  # (heads, K, rank)
        above = [linear(drafted.to(head.down), head.down.detach()) for head in heads]
        self.above = torch.stack(above).to(below)  # (heads, K, rank)
        if memory is not None:
            self.below, self.above = memory.copy(self.below), memory.copy(self.above)
        self._heads = torch.arange(num_heads, device=below.device)[:, None, None]

    def apply(
        self, serial_tokens: torch.Tensor, tokens: torch.Tensor, log_probs: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """
        Returns the log-probabilities `(B, heads, P, M, M)` of candidates: `[b, i, p, a, c]` is that of candidate c of
        head i under candidate a of the head above. The first head reads the serial token instead, for every a.

        Args:
            serial_tokens (`(B, P)`): The last token of each serial path, as an index from 0 to `K - 1`.
            tokens (`(B, heads, P, M)`): The candidates, as such indices.
            log_probs (`(B, heads, P, M)`): Their log-probabilities by the heads alone.
            scales (`(heads, 1, 1, 1)`): Factors of the logits of each head.
        """
        first = serial_tokens[:, None, :, None].expand(-1, 1, -1, tokens.shape[3])
        above = self.above[self._heads, torch.cat((first, tokens[:, :-1]), dim=1)].float()
        below = self.below[self._heads, tokens].float()  # (B, heads, P, M, rank)
        return condition(log_probs, above @ below.transpose(-1, -2) * scales)
