"""How good a drafter is: how far it agrees with the target on a text, what that implies, and the measured tau."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..commands import UserValueError
from ..generation.verification.traits import input_device
from ..model.decoding_settings import NEVER_PAUSES
from ..model.modeling_gumiho import GumihoModel
from ..model.outputs import GumihoOutput
from .data.target_runs import ONE_ROW_EACH
from .losses.chunked import DEFAULT_CHUNK_SIZE, pieces
from .losses.positions import WHAT_COUNTS, select_positions
from .losses.predictors import LossWeights, Predictor, predictions_of
from .losses.terms import TERMS, LMHead, Readout


# The first columns of a score table. One for each loss term follows.
AGREEMENTS, POSITIONS, FIRST_TERM = range(3)


@torch.no_grad()
def score_predictions(
    output: GumihoOutput,
    hidden_states: torch.Tensor,
    lm_head: LMHead,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    weights: LossWeights | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    vocabulary: tuple[torch.Tensor | None, LMHead] | None = None,
) -> torch.Tensor:
    """
    Scores each prediction of each row. Arguments as in [`chunked_gumiho_loss`], with an output made with
    `unroll`, so that prediction q is the drafter's at draft position q + 1.

    `vocabulary` holds the tokens `(K,)` that may be drafted, if not all, and the output head that scores features for
    them alone. The loss terms are then over these tokens. Where the target's choice cannot be drafted, the prediction
    disagrees.

    Returns:
        `(B, Q, 2 + T)`: sums over the row's positions of the top-1 agreements with the target, of 1, and of each of
        the `T` loss terms that have a place in `weights`.
    """
    predictions = predictions_of(output, weights or LossWeights())
    selected = select_positions(predictions, hidden_states, loss_mask, position_ids)
    token_ids, draft_head = vocabulary or (None, lm_head)
    names = list(predictions[0][0].weights)
    table = torch.zeros(len(loss_mask), len(predictions), FIRST_TERM + len(names), device=hidden_states.device)
    for piece in pieces(len(selected.rows), chunk_size):
        logits = lm_head(selected.targets[piece])
        top_tokens = logits.argmax(dim=-1)
        logits = logits if token_ids is None else logits[:, token_ids]
        target = Readout(selected.targets[piece], partial(_computed, logits))
        for index in range(len(predictions)):
            prediction = Readout(selected.features[index, piece], draft_head)
            drafts = prediction.logits.argmax(dim=-1)
            valid = selected.valid[index, piece].float()
            agreements = ((drafts if token_ids is None else token_ids[drafts]) == top_tokens).float()
            terms = [TERMS[name](prediction, target) for name in names]
            scores = torch.stack([agreements, torch.ones_like(valid), *terms], dim=-1) * valid[:, None]
            table[:, index].index_add_(0, selected.rows[piece], scores)
    return table


def _computed(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return logits


def expected_acceptance_length(agreements: Sequence[float]) -> float:
    """
    Returns the tokens that a cycle commits on average, the bonus token included, where the draft at position k is
    right with probability `agreements[k]` if those before it are: `1 + p_1 + p_1 p_2 + ...` (arXiv 2503.10135).
    """
    return float(1 + np.cumprod(agreements).sum())


def agreement_metrics(table: np.ndarray, drafter_predictors: Sequence[Predictor]) -> dict[str, float]:
    """
    Turns the score tables of all rows of an evaluation `(rows, Q, 2 + T)` into metrics: `loss`, its terms, the top-1
    `agreement_k` at each draft position k = 1..Q, and the `expected_acceptance_length` that these imply. The loss sums
    the terms under the weights of the `Q` predictors. Raises `ValueError` where nothing was evaluated.
    """
    if not table[..., POSITIONS].any():
        raise UserValueError(
            f"The evaluation data has no state that counts, so there is nothing to evaluate. {WHAT_COUNTS}"
        )
    sums = table.sum(axis=0, dtype=np.float64)
    means = sums / np.maximum(sums[:, POSITIONS : POSITIONS + 1], 1)
    metrics = {"loss": 0.0, "expected_acceptance_length": expected_acceptance_length(means[:, AGREEMENTS])}
    for position, (predictor, mean) in enumerate(zip(drafter_predictors, means, strict=True), start=1):
        metrics[f"agreement_{position}"] = float(mean[AGREEMENTS])
        for (name, weight), value in zip(predictor.weights.items(), mean[FIRST_TERM:].tolist(), strict=True):
            metrics[f"{predictor.name}_{name}"] = value
            metrics["loss"] += weight * value
    return metrics


@torch.no_grad()
def measure_acceptance(
    target: PreTrainedModel,
    drafter: GumihoModel,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int = 128,
    **generate_kwargs: Any,
) -> list[list[int]]:
    """
    Generates from each prompt, greedily by default, with the drafter's own settings, but without pauses.

    Args:
        target: The target.
        drafter: The drafter, or a `PeftModel` around one.
        prompts: Token ids `(T,)` of each prompt.
        max_new_tokens: Tokens to generate for each.
        **generate_kwargs: For `generate()`.

    Returns:
        For each prompt, the tokens that each drafted cycle committed. Tau is their mean.
    """
    training, own_settings = drafter.training, drafter.generation_config
    drafter.eval()
    break_even = getattr(own_settings, "break_even", None)
    own_settings.break_even = NEVER_PAUSES
    # What is trained is the drafter, whatever the context would draft.
    settings = ONE_ROW_EACH | {"do_sample": False, "prompt_lookup_num_tokens": 0, "return_dict_in_generate": True}
    settings |= generate_kwargs
    settings |= {"max_new_tokens": max_new_tokens, "assistant_model": drafter}
    lengths = []
    try:
        for prompt in prompts:
            ids = torch.as_tensor(prompt, device=input_device(target))[None]
            output = target.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            cycles = zip(output.accepted_lengths[0], output.draft_origins, strict=True)
            lengths.append([number for number, origin in cycles if origin == "drafter"])
    finally:
        own_settings.break_even = break_even
        drafter.train(training)
    return lengths
