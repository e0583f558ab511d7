"""The drafter behind transformers' interface for candidate generators."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation import CandidateGenerator

from ..model.modeling_gumiho import GumihoModel
from ..tree.draft_tree import DraftTree
from .drafter import GumihoDrafter
from .settings import DraftingSettings


class GumihoCandidateGenerator(CandidateGenerator):
    """
    Generates the candidates of a Gumiho drafter: a [`DraftTree`] per cycle, or its most likely path.

    Args:
        assistant_model ([`GumihoModel`]): The drafter, on any device.
        lm_head: The target's output head, from hidden states `(..., H)` to logits `(..., V)`, or `(..., K)` with
            `token_ids`.
        settings ([`DraftingSettings`]): Shape of the tree.
        past_key_values: An empty `TreeCache` for the drafter.
        **drafter_kwargs: Further arguments of [`GumihoDrafter`].
    """

    requires_model_outputs = True

    def __init__(
        self,
        assistant_model: GumihoModel,
        lm_head: Callable[[torch.Tensor], torch.Tensor],
        settings: DraftingSettings,
        past_key_values: Any,
        **drafter_kwargs: Any,
    ):
        self.assistant_model = assistant_model
        self.device = assistant_model.fc.weight.device
        self.drafter = GumihoDrafter(assistant_model, lm_head, settings, past_key_values, **drafter_kwargs)

    def get_tree(
        self,
        tokens: torch.Tensor,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        counts: list[int],
        attention_mask: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
    ) -> DraftTree:
        """
        Drafts a tree after newly committed tokens. The arguments are those of [`GumihoDrafter.draft`], on any device;
        the tree is on the device of `tokens`.
        """
        tree = self.drafter.draft(
            tokens.to(self.device),
            hidden_states.to(self.device),
            position_ids.to(self.device),
            counts,
            attention_mask.to(self.device) if attention_mask is not None else None,
            noise,
        )
        return tree.to(tokens.device)

    def get_candidates(
        self, input_ids: torch.Tensor, hidden_states: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """
        Returns `input_ids` followed by the best of the tree's deepest paths, for one sequence.

        Args:
            input_ids (`(1, T)`): The committed text.
            hidden_states (`(1, n, H)`): The target's last hidden states before its newest `n` tokens: of the whole
                text but its last token in the first call, of what was committed since then later on.

        Returns:
            Candidates `(1, T + depth)`, and no candidate logits: drafted tokens are verified as point masses.

        Raises:
            ValueError: There are no hidden states, or several sequences.
        """
        if hidden_states is None:
            raise ValueError("Gumiho drafts from the target's last hidden states; pass them as `hidden_states`.")
        if input_ids.shape[0] != 1:
            raise ValueError(f"A single path fits one sequence, got a batch of {input_ids.shape[0]}; use `get_tree`.")
        num_new = hidden_states.shape[1]
        stop = input_ids.shape[1] - 1
        positions = torch.arange(stop - num_new, stop, device=input_ids.device)[None]
        tree = self.get_tree(input_ids[:, -num_new:], hidden_states, positions, [num_new])
        return torch.cat((input_ids, best_path(tree).to(input_ids.device)), dim=1), None


def best_path(tree: DraftTree) -> torch.Tensor:
    """Returns the tokens `(1, depth)` of the best of the deepest paths of a tree of one row, without the root."""
    # Nodes are sorted by score, so the first of the deepest ones is the best of them.
    deepest = tree.depths[0].argmax()
    nodes = tree.ancestors[0, deepest].nonzero().squeeze(1)
    return tree.tokens[:, nodes[1:]]
