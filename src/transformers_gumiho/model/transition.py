"""The transitions of the parallel heads: what the token above says of the one that a head drafts."""

import torch
from torch import nn

from .configuration_gumiho import GumihoConfig


# In drafting, the tokens that are candidates of a head under a serial path: its own best. One that it ranks after
# them is not drafted, even if the token above speaks for it.
NUM_CANDIDATES = 32


class GumihoTransition(nn.Module):
    """
    Moves the feature of one parallel head by `up @ down @ e`, with the embedding `e` `(E,)` of the token above.

    With row `w_b` of the output head, this adds `(up.T @ w_b) @ (down @ e_a)` to the logit of token b under token a:
    a low-rank term for each pair of tokens. `up` starts at zero, so that logits are unchanged at first.
    """

    def __init__(self, embedding_size: int, hidden_size: int, rank: int):
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, embedding_size))
        self.up = nn.Parameter(torch.empty(hidden_size, rank))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)
        nn.init.zeros_(self.up)

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Maps embeddings of the tokens above `(..., E)` to what is added to the features, `(..., H)`."""
        return nn.functional.linear(nn.functional.linear(embeddings, self.down), self.up)


class GumihoTransitions(nn.ModuleList):
    """The transition of each parallel head. That of the first head reads the last serial token."""

    def __init__(self, config: GumihoConfig):
        super().__init__(
            GumihoTransition(config.embedding_width, config.get_text_config().hidden_size, config.transition_rank)
            for _ in range(config.num_parallel_heads)
        )

    def forward(self, features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """
        Moves the features of a text.

        Args:
            features (`(B, P, T, H)`): What the heads made.
            embeddings (`(B, T + P - 1, E)`): Of the tokens above: head i at position t reads entry `t + i`.
        """
        num_paths = features.shape[2]
        offsets = [transition(embeddings[:, head : head + num_paths]) for head, transition in enumerate(self)]
        return features + torch.stack(offsets, dim=1)
