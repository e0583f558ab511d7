"""How often drafted tokens are accepted, by what the drafter thinks of them and by how deep in the tree they are."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..decoding.observers import GenerationObserver, observing
from ..measuring.decoding_settings import DRAFTER_ALONE, decoding_settings
from ..model.acceptance_curves import AcceptanceCurve, AcceptanceCurves
from ..model.modeling_gumiho import GumihoModel
from ..tree.draft_tree import DraftTree
from ..tree.verification import AcceptedPath
from .answers import Answer, decode_answers
from .costs import smooth


# Scores (nats) between which tokens are counted together.
_EDGES = (0.0, -0.01, -0.03, -0.1, -0.2, -0.4, -0.7, -1.0, -1.5, -2.0, -3.0, -4.0, -5.0, -7.0, -10.0, -15.0, -25.0)
# Fewer tokens tell too little of their own.
_LEAST_COUNT = 20
# For how many tokens it stands that the drafter's own probabilities are right, and for how many of a depth that they
# are accepted as often as those of all depths.
_PRIOR_COUNT = 20


@torch.inference_mode()
def measure_acceptance_curves(
    target: PreTrainedModel,
    drafter: GumihoModel,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    settings: dict[str, Any],
    **generate_kwargs: Any,
) -> tuple[tuple[AcceptanceCurve, ...] | None, list[Answer]]:
    """
    Decodes prompts `(T,)` under `settings`, and counts which drafted tokens were accepted.

    Args:
        target: The target.
        drafter: The drafter. Its settings are as before afterwards.
        prompts: Token ids of each prompt.
        max_new_tokens: Tokens to generate for each.
        settings: Decoding settings of the drafter.
        **generate_kwargs: For `generate()`.

    Returns:
        The curves of depth 1, 2, ..., `None` where nothing was drafted, and what the target answered.
    """
    recorder = _ScoreRecorder()
    with observing(recorder), decoding_settings(drafter, settings | DRAFTER_ALONE):
        answers = decode_answers(target, drafter, prompts, max_new_tokens, **generate_kwargs)
    if not recorder.scores:
        return None, answers
    observed = (np.concatenate(kept) for kept in (recorder.scores, recorder.depths, recorder.accepted))
    return fit_acceptance_curves(*observed), answers


def fit_acceptance_curves(scores: np.ndarray, depths: np.ndarray, accepted: np.ndarray) -> tuple[AcceptanceCurve, ...]:
    """
    Returns for each depth the never decreasing curve through the shares of accepted tokens.

    Args:
        scores (`(n,)`): Of drafted tokens, never positive.
        depths (`(n,)`): Of these tokens; some are at each depth from 1 to the largest.
        accepted (`(n,)`, bool): Which of them were accepted.
    """
    of_all = AcceptanceCurves((_fit_curve(scores, accepted, np.exp),))

    def share_of_all(score: float) -> float:
        at = torch.tensor([[score]], dtype=torch.float64)
        return float(of_all.log_probabilities(at, torch.ones_like(at, dtype=torch.long)).exp())

    at_depths = (depths == depth for depth in range(1, int(depths.max()) + 1))
    return tuple(_fit_curve(scores[chosen], accepted[chosen], share_of_all) for chosen in at_depths)


def _fit_curve(scores: np.ndarray, accepted: np.ndarray, prior: Callable[[float], float]) -> AcceptanceCurve:
    """Returns one curve; `prior` is what is expected of tokens with a score before any were counted."""
    order = np.argsort(scores, kind="stable")
    scores, accepted = np.maximum(scores[order], _EDGES[-1]), accepted[order]
    groups: list[tuple[float, int, int]] = []  # sum of scores, accepted, count
    for places in np.split(np.arange(len(scores)), np.searchsorted(scores, sorted(_EDGES)[1:-1], side="right")):
        group = float(scores[places].sum()), int(accepted[places].sum()), len(places)
        if groups and groups[-1][2] < _LEAST_COUNT:
            # Those below are too few.
            group = tuple(a + b for a, b in zip(groups.pop(), group, strict=True))  # type: ignore[assignment]
        if group[2]:
            groups.append(group)
    means = [round(total / count, 4) + 0.0 for total, _, count in groups]
    # As if there had been some more tokens, of which as many were accepted as was expected: few tokens prove little.
    counted = zip(means, groups, strict=True)
    shares = smooth(
        {
            place: (hits + _PRIOR_COUNT * prior(mean)) / (count + _PRIOR_COUNT)
            for place, (mean, (_, hits, count)) in enumerate(counted)
        }
    )
    # A share of 0 would say more than anybody can know.
    return AcceptanceCurve(tuple(means), tuple(max(round(float(share), 6), 1e-6) for share in shares.values()))


class _ScoreRecorder(GenerationObserver):
    """Keeps the scores and depths of all drafted tokens of single texts, and which of them were accepted."""

    def __init__(self) -> None:
        self.scores: list[np.ndarray] = []
        self.depths: list[np.ndarray] = []
        self.accepted: list[np.ndarray] = []

    def on_cycle(self, tree: DraftTree, path: AcceptedPath) -> None:
        scores = tree.scores[0].numpy(force=True).astype(np.float64)
        accepted = np.zeros(len(scores), dtype=bool)
        accepted[path.nodes[0, 1 : path.accepted_lengths[0]].numpy(force=True)] = True
        self.scores.append(scores[1:])
        self.depths.append(tree.depths[0, 1:].numpy(force=True))
        self.accepted.append(accepted[1:])
