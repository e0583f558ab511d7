"""The parallel heads' transitions in drafting: for pairs of candidate tokens alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from ..model.modeling_gumiho import GumihoModel
from ..target.static_memory import StaticMemory
from ..tree.conditional import ConditionalCandidates, condition


# The output head is asked for a small multiple of each direction, as it may cap its logits.
_STEP = 1 / 16


class DraftTransitions:
    """
    What the token above a parallel head's draft adds to the logits, as two tables over the tokens that may be drafted:
    the product of an entry of each is the term of a pair. They are made once for a call of `generate()`.

    Args:
        model: A drafter with transitions.
        num_heads: The heads that draft.
        lm_head: As in [`GumihoDrafter`].
        token_ids (`(K,)`, *optional*): As in [`GumihoDrafter`].
        memory: Where the tables are to lie, if a captured graph is to find them.
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
        self.embed_tokens, self.first_down = model.embed_tokens, heads[0].down.detach()
        embedding = model.embed_tokens.weight.detach()
        drafted = embedding if token_ids is None else embedding[token_ids.to(embedding.device)]
        up = torch.stack([head.up.detach() for head in heads]).transpose(1, 2) * _STEP  # (heads, rank, H)
        # The output head is linear, but for its bias.
        below = (lm_head(up) - lm_head(torch.zeros_like(up[:1, :1]))) / _STEP
        self.below = below.transpose(1, 2).contiguous()  # (heads, K, rank)
        above = [linear(drafted.to(head.down), head.down.detach()) for head in heads[1:]]
        self.above = torch.stack(above).to(below) if above else below.new_empty(0)  # (heads - 1, K, rank)
        if memory is not None:
            self.below, self.above = memory.copy(self.below), memory.copy(self.above)

    def apply(
        self,
        serial_tokens: torch.Tensor,
        choices: torch.Tensor,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> ConditionalCandidates:
        """
        Returns the candidates of the heads with their probabilities under the tokens above them.

        Args:
            serial_tokens (`(B, P)`): The last token of each serial path.
            choices (`(B, heads, P, M)`): The candidates, as places among the tokens that may be drafted.
            tokens (`(B, heads, P, M)`): Their token ids.
            log_probs (`(B, heads, P, M)`): Their log-probabilities by the heads alone.
            temperatures (`(heads, 1, 1)`): By which logits are divided.
        """
        num_heads = choices.shape[1]
        heads = torch.arange(num_heads, device=choices.device)[:, None, None]
        below = self.below[heads, choices].float()  # (B, heads, P, M, rank)
        embedded = self.embed_tokens(serial_tokens.to(self.first_down.device)).to(self.first_down)
        first_above = linear(embedded, self.first_down).to(below)
        moves = (below[:, 0] @ first_above[..., None]).squeeze(-1) / temperatures[0]
        first = condition(log_probs[:, 0], moves)
        if num_heads == 1:
            return ConditionalCandidates(tokens, first, first.new_empty(0))
        above = self.above[heads[:-1], choices[:, :-1]].float()
        moves = above @ below[:, 1:].transpose(-1, -2) / temperatures[1:, None]
        return ConditionalCandidates(tokens, first, condition(log_probs[:, 1:, :, None], moves))
