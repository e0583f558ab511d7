"""How far trees of every size would have been accepted, from one run with large ones.

A tree holds its nodes in the order of their scores, so the tree of a smaller budget is its beginning: a drafted token
that was accepted in the large tree is accepted under every budget that reaches its node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..decoding.observers import GenerationObserver, observing
from ..measuring.decoding_settings import DRAFTER_ALONE, decoding_settings
from ..model.modeling_gumiho import GumihoModel
from ..tree.draft_tree import DraftTree
from ..tree.verification import AcceptedPath


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
    recorder = _AcceptanceRecorder(drafter.config.max_draft_depth)
    of_prompts = [settings] * len(prompts) if isinstance(settings, dict) else settings
    with observing(recorder):
        for index, (prompt, of_prompt) in enumerate(zip(prompts, of_prompts, strict=True)):
            torch.manual_seed(index)
            with decoding_settings(drafter, of_prompt | DRAFTER_ALONE):
                ids = prompt[None].to(target.device)
                target.generate(
                    ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, max_new_tokens=max_new_tokens,
                    **{"do_sample": False} | generate_kwargs,
                )  # fmt: skip
    if not recorder.cycles:
        raise ValueError("The prompts end before anything is drafted. Give others, or more `max_new_tokens`.")
    return AcceptanceProfile(np.stack(recorder.cycles))


class _AcceptanceRecorder(GenerationObserver):
    """Records under which budgets each cycle of single texts would have been what it was, up to `max_depth`."""

    def __init__(self, max_depth: int):
        self.max_depth = max_depth
        self.cycles: list[np.ndarray] = []

    def on_cycle(self, tree: DraftTree, path: AcceptedPath) -> None:
        accepted = path.nodes[0, 1 : path.accepted_lengths[0]].tolist()
        self.cycles.append(_needed_budgets(tree.depths[0].tolist(), accepted, self.max_depth))


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
