"""The transitions of the parallel heads in vLLM: each head's token depends on the token above it."""

from collections.abc import Callable

import torch
from torch import nn

from ..model.transition import NUM_CANDIDATES


class ChainTransitions(nn.Module):
    """
    The first `num_heads` transitions; see [`GumihoTransition`]. Before weights are loaded, they change nothing.

    Args:
        num_heads: Number of transitions, `P`.
        hidden_size: `H`, also the width of the embedding.
        rank: `R`.
    """

    def __init__(self, num_heads: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(num_heads, rank, hidden_size), requires_grad=False)
        self.up = nn.Parameter(torch.zeros(num_heads, hidden_size, rank), requires_grad=False)
        # `(P, K, R)`: the output head applied to `up`.
        self._below: torch.Tensor | None = None

    def places(self) -> dict[str, torch.Tensor]:
        """Returns the places of a checkpoint's tensors, by their plain names."""
        return {
            f"transition.{head}.{kind}": parameter.data[head]
            for kind, parameter in (("down", self.down), ("up", self.up))
            for head in range(len(parameter))
        }

    @torch.no_grad()
    def adopt_output_head(self, score: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Computes the tables for [`best_candidates`], with an output head from `(n, H)` to `(n, K)`."""
        directions = self.up.transpose(1, 2).flatten(0, 1).contiguous()  # some kernels require it
        # The output head is linear except for its bias.
        below = score(directions) - score(torch.zeros_like(directions[:1]))
        num_heads, rank, _ = self.down.shape
        self._below = below.view(num_heads, rank, -1).transpose(1, 2).contiguous()

    def keep_tokens(self, token_ids: torch.Tensor) -> None:
        """Cuts the tables to the tokens `(K,)` that may be drafted."""
        assert self._below is not None
        self._below = self._below.index_select(1, token_ids)

    def move(self, head: int, features: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        """Adds the transition for the embeddings `(n, H)` of the tokens above to the features `(n, H)` of a head."""
        return features + above.to(features) @ self.down[head].T @ self.up[head].T

    def best_candidates(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        embed: Callable[[torch.Tensor], torch.Tensor],
        token_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """
        Returns chains `(n, P)`: for each head the best of its own top tokens, given the token above.

        Args:
            logits (`(n, P, K)`): Logits of the heads without transitions. tokens (`(n,)`): The last serial token of
            each chain.
            embed: Maps tokens `(n,)` to embeddings `(n, H)`.
            token_ids (`(K,)`, *optional*): Ids of the tokens of the logits. By default all tokens.
        """
        assert self._below is not None
        best = logits.topk(min(NUM_CANDIDATES, logits.shape[-1]))
        chain = []
        for head, (scores, places) in enumerate(zip(best.values.unbind(1), best.indices.unbind(1), strict=True)):
            above = embed(tokens).to(self.down) @ self.down[head].T
            moves = self._below[head][places].float() @ above.float()[..., None]
            chosen = (scores.float() + moves.squeeze(-1)).argmax(dim=-1, keepdim=True)
            tokens = places.gather(1, chosen).squeeze(1)
            tokens = tokens if token_ids is None else token_ids[tokens]
            chain.append(tokens)
        return torch.stack(chain, dim=1)
