"""A branch of draft trees that the context drafts: added to a drafter's tree, or a tree of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
        is_run: Whether it follows drafts that were all right, and is to be verified alone.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
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
            is_run,
        )

    def added_to(self, tree: DraftTree, is_chain: bool) -> DraftTree:
        """Returns the best nodes of a tree and of the branch, as many as the tree has; of a chain, the better path."""
        return (take_better_chain if is_chain else merge_branch)(tree, self.tokens, self.log_probs)

    def alone(self, root_tokens: torch.Tensor) -> DraftTree:
        """Returns the tree with the branch alone under the newest committed tokens `(B,)`."""
        return single_path(root_tokens, self.tokens, self.log_probs.cumsum(dim=1))
