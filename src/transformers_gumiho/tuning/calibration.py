"""Temperatures that make a drafter as sure as it is right, one for each depth.

A parallel head sees less of the text the further it looks ahead. Where it is surer of its tokens than it may be, its
nodes take the place of better ones in the tree; a temperature of its own for each depth puts that right.

They are fitted on the target's own answers, by teacher forcing: one pass of the drafter with `unroll=True` gives the
features that drafting has on the accepted path, at every position of a text at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..losses.predictors import predictions_of
from ..losses.temperatures import LOG_TEMPERATURES, best_temperature, likelihood_losses
from ..losses.weights import LossWeights
from ..model.modeling_gumiho import GumihoModel
from ..target.feature_reader import FeatureReader
from ..target.output_head import output_head
from .answers import Answer


# Rows of logits held at a time: 131 MB in float32 with a vocabulary of 128k, and as much again to divide them.
CHUNK_SIZE = 256


@dataclass(frozen=True)
class DraftLosses:
    """
    How badly the drafter predicts each answer, at each depth and under each temperature of a grid.

    Attributes:
        sums (`(A, D, G)`): Negative log-likelihood (nats) that depth d + 1 gives to the tokens of answer a under
            `exp(LOG_TEMPERATURES[g])`, summed over the answer.
        counts (`(A, D)`): Tokens in each sum.
    """

    sums: torch.Tensor
    counts: torch.Tensor

    def best_temperatures(self, answers: Iterable[int] | None = None) -> tuple[float, ...]:
        """
        Returns the temperature of each depth under which the tokens of these answers (by default all) are most likely.

        A depth that no answer is long enough for takes that of the depth above.

        Raises:
            ValueError: The answers hold no drafted token at all.
        """
        rows = list(range(len(self.counts)) if answers is None else answers)
        sums, counts = self.sums[rows].sum(dim=0), self.counts[rows].sum(dim=0)
        if not counts.any():
            raise ValueError("The answers have one token at most, none of them drafted. Give others, or longer ones.")
        found: list[float] = []
        for curve, count in zip(sums, counts, strict=True):
            found.append(round(best_temperature(curve / count), 3) if count else found[-1])
        return tuple(found)


@torch.inference_mode()
def measure_draft_losses(
    target: PreTrainedModel, drafter: GumihoModel, answers: Sequence[Answer], chunk_size: int = CHUNK_SIZE
) -> DraftLosses:
    """
    Scores the drafter's predictions of the tokens of answers under every temperature of the grid.

    Args:
        target: The target.
        drafter: The drafter.
        answers: What the target answered.
        chunk_size: Rows of logits to hold at a time. (The drafter's pass holds a mask of about `(S * T)^2` entries
            for `S` serial tokens and a text of `T`.)
    """
    head = output_head(target)
    shape = (len(answers), drafter.config.max_draft_depth)
    sums = torch.zeros(*shape, len(LOG_TEMPERATURES), dtype=torch.float64)
    counts = torch.zeros(shape, dtype=torch.long)
    for row, answer in enumerate(tqdm(answers, desc="calibrating", unit="answer")):
        for index, (features, tokens) in enumerate(features_of_drafts(target, drafter, answer)):
            for start in range(0, len(tokens), chunk_size):
                piece = slice(start, start + chunk_size)
                losses = likelihood_losses(head(features[piece]), tokens[piece])
                # A feature that overflowed has no say.
                finite = losses.isfinite().all(dim=1)
                sums[row, index] += losses[finite].sum(dim=0).cpu()
                counts[row, index] += int(finite.sum())
    return DraftLosses(sums, counts)


@torch.inference_mode()
def features_of_drafts(
    target: PreTrainedModel, drafter: GumihoModel, answer: Answer
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """
    Returns, for each depth d from 1 down, features `(n, H)` in the target's dtype and the answer's tokens `(n,)` that
    they predict: what drafting has on the accepted path for each token of the answer as the root in turn, d tokens
    before the one that is predicted.
    """
    ids = answer.tokens[None].to(target.device)
    states = FeatureReader(target, drafter.config.target_layer_ids).read(ids)
    device, like = drafter.fc.weight.device, states.last
    output = drafter(ids[:, 1:].to(device), states.drafter_input[:, :-1].to(device), unroll=True)
    found = []
    for predictor, features in predictions_of(output, LossWeights()):
        # The feature at place t has read token t + 1, its root, and predicts the token `shift` after it.
        first_root = answer.prompt_length
        tokens = ids[0, first_root + predictor.shift :].to(like.device)
        features = features[0, first_root - 1 : first_root - 1 + len(tokens)]
        found.append((features.to(device=like.device, dtype=like.dtype), tokens))
    return found


def cross_fitted(losses: DraftLosses) -> tuple[tuple[float, ...], list[tuple[float, ...]]]:
    """
    Returns the temperatures fitted on all answers, and for each answer those fitted on the half that it is not in: a
    profile under the latter does not flatter the former. A single answer has no other half.
    """
    rows = range(len(losses.counts))
    fitted = losses.best_temperatures()
    if len(rows) < 2 or not all(losses.counts[half::2].any() for half in (0, 1)):
        return fitted, [fitted] * len(rows)
    of_other_half = [losses.best_temperatures(rows[1 - half :: 2]) for half in (0, 1)]
    return fitted, [of_other_half[row % 2] for row in rows]
