"""A branch of draft trees that the context drafts: added to a drafter's tree, or a tree by itself."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ..tree.draft_tree import DraftTree, single_path
from ..tree.merging import merge_branch, take_better_chain
from ..uploads import upload


@dataclass(frozen=True)
class ContextBranch:
    """
    A path in each row.

    Attributes:
        tokens (`(B, M)`): The tokens of each row from depth 1 down.
        log_probs (`(B, M)`): For each the logarithm of the estimate that it is accepted if those before it are: minus
            infinity from where the path of the row has ended.
        scores (`(B, M)`): Their sums down to each token, on the host.
        is_run: Whether it goes on where one before it was right to its end, and is to be verified alone.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    scores: np.ndarray
    is_run: bool = False

    @classmethod
    def make(
        cls,
        tokens: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
        device: torch.device,
        is_run: bool = False,
    ) -> "ContextBranch":
        """Returns the branch with these tokens and logarithms in each row, equally many."""
        return cls(
            upload(tokens, device),
            upload(log_probs, device, torch.float32),
            np.array(log_probs).cumsum(axis=1),
            is_run,
        )

    def first(self, num_tokens: int) -> "ContextBranch":
        """Returns the branch of no more than the first `num_tokens` tokens, which is no run."""
        return ContextBranch(self.tokens[:, :num_tokens], self.log_probs[:, :num_tokens], self.scores[:, :num_tokens])

    def added_to(self, tree: DraftTree, is_chain: bool) -> DraftTree:
        """Returns the best nodes of a tree and of the branch, as many as the tree has; of a chain, the better path."""
        return (take_better_chain if is_chain else merge_branch)(tree, self.tokens, self.log_probs)

    def alone(self, root_tokens: torch.Tensor, num_drafted: int, num_nodes: int) -> DraftTree:
        """
        Returns the tree that holds nothing but the first tokens of the branch.

        Args:
            root_tokens (`(B,)`): The newest committed tokens.
            num_drafted: How many of its tokens.
            num_nodes: The most drafted tokens of any tree of the generation, or of a run. What is cut from so many has
                the strides of all others, which compiled functions tell apart.
        """
        missing = num_nodes - self.tokens.shape[1]
        tokens = nn.functional.pad(self.tokens, (0, missing))
        scores = nn.functional.pad(self.log_probs.cumsum(dim=1), (0, missing), value=-torch.inf)
        return single_path(root_tokens, tokens, scores).first(num_drafted)
