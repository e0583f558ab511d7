"""How far trees of every size would have been accepted, from one run with large ones.

A tree holds its nodes in the order of their scores, so the tree of a smaller budget is its beginning: a drafted token
that was accepted in the large tree is accepted under every budget that reaches its node.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..decoding.token_choice import TokenChooser
from ..measuring.decoding_settings import decoding_settings
from ..measuring.stages import replace_until_left
from ..model.modeling_gumiho import GumihoModel
from ..tree.draft_tree import DraftTree


@dataclass(frozen=True)
class AcceptanceProfile:
    """
    Attributes:
        needed (`(cycles, D, D)`): `[c, d - 1, k - 1]` is the smallest number of drafted tokens at which cycle c would
            have accepted its k-th one in trees no deeper than d; infinite where it would not under any.
    """

    needed: np.ndarray

    def tau(self, num_assistant_tokens: int, tree_depth: int) -> float:
        """
        Returns the mean acceptance length (tokens per cycle, bonus token included) of trees of at most
        `num_assistant_tokens` drafted tokens and `tree_depth` levels.

        The last cycle of a text counts with the tokens that the text still took, as in any measurement of finished
        texts; so tau is that of texts of about this length.
        """
        return 1.0 + float((self.needed[:, tree_depth - 1] <= num_assistant_tokens).sum(axis=1).mean())


@torch.inference_mode()
def profile_acceptance(
    target: PreTrainedModel,
    drafter: GumihoModel,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    settings: dict[str, Any] | Sequence[dict[str, Any]],
    **generate_kwargs: Any,
) -> AcceptanceProfile:
    """
    Decodes prompts `(T,)` with the drafter under `settings` and records where its trees were accepted.

    Args:
        target: The target.
        drafter: The drafter. Its settings are as before afterwards.
        prompts: Token ids of each prompt.
        max_new_tokens: Tokens to generate for each.
        settings: Decoding settings of the drafter, for all prompts or for each; `num_assistant_tokens` is the largest
            tree that can be told of.
        **generate_kwargs: For `generate()`.

    Raises:
        ValueError: The texts end before anything is drafted.
    """
    cycles: list[np.ndarray] = []
    max_depth = drafter.config.max_draft_depth
    commit = TokenChooser.commit

    def recording_commit(self: TokenChooser, tree: DraftTree, logits: torch.Tensor) -> Any:
        nodes, kept = commit(self, tree, logits)
        if tree.max_depth:  # not the prompt
            cycles.append(_needed_budgets(tree.depths[0].tolist(), nodes[0, 1 : kept[0]].tolist(), max_depth))
        return nodes, kept

    of_prompts = [settings] * len(prompts) if isinstance(settings, dict) else settings
    with ExitStack() as stack:
        replace_until_left(stack, TokenChooser, "commit", recording_commit)
        for index, (prompt, of_prompt) in enumerate(zip(prompts, of_prompts, strict=True)):
            torch.manual_seed(index)
            with decoding_settings(drafter, of_prompt):
                target.generate(
                    prompt[None].to(target.device), assistant_model=drafter, max_new_tokens=max_new_tokens,
                    **{"do_sample": False} | generate_kwargs,
                )  # fmt: skip
    if not cycles:
        raise ValueError("The prompts end before anything is drafted. Give others, or more `max_new_tokens`.")
    return AcceptanceProfile(np.stack(cycles))


def _needed_budgets(depths: list[int], accepted: list[int], max_depth: int) -> np.ndarray:
    """Returns one cycle's `(D, D)`, for the depths of a tree's nodes and the accepted nodes from depth 1 down."""
    needed = np.full((max_depth, max_depth), np.inf)
    node_depths = np.array(depths)
    for limit in range(1, max_depth + 1):
        # How many drafted nodes of at most this depth there are up to each node, itself included.
        ranks = np.cumsum(node_depths <= limit) - 1
        for place, node in enumerate(accepted[:limit]):
            needed[limit - 1, place] = ranks[node]
    return needed
