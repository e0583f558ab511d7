"""The loss of a drafter, with the logits of a few hundred positions at a time.

The output head is frozen, so each piece can compute its loss *and* the gradient of its features, and let its logits
go. What stays is one gradient as large as the features. Nothing is computed twice, and nothing at positions that do
not count.

`N` positions that count, `Q` predictions per position, `H` hidden size, `T` terms.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ...model.outputs import GumihoOutput
from .positions import select_positions
from .predictors import LossWeights, predictions_of
from .terms import TERMS, LMHead, Readout


# Rows of logits held at a time: 131 MB in float32 with a vocabulary of 128k. Fewer would not keep a GPU busy.
DEFAULT_CHUNK_SIZE = 256


def chunked_gumiho_loss(
    output: GumihoOutput,
    hidden_states: torch.Tensor,
    lm_head: LMHead,
    loss_mask: torch.Tensor,
    weights: LossWeights | None = None,
    position_ids: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    draft_head: LMHead | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """
    Computes the loss of a drafter on a batch of text: the sum over its predictors of `w_f * smooth_l1(f, h)` and
    `w_ce * cross_entropy(lm_head(f), lm_head(h))`, for the feature f that predicts state h. Source: arXiv 2503.10135,
    with the weights and shifts of the published training code. A term of weight zero is not computed.

    `B` batch size, `L` tokens of text, `H` hidden size.

    Args:
        output: The drafter's output for tokens `x_1 ..` and states `.. h_{L-2}`.
        hidden_states (`(B, L, H)`): The target's last hidden states of the text.
        lm_head: The target's output head.
        loss_mask (`(B, L)`): 1 at the states that count as targets.
        weights: See [`LossWeights`].
        position_ids (`(B, L)`, *optional*): The position of each token in its own text, where a row holds several.
            No prediction counts across two texts.
        counts (`(Q,)`, *optional*): The number of positions that each term is to be averaged over, where the batch is
            a part of a larger one. By default those of this batch.
        chunk_size: Rows of logits of the drafter, and as many of the target, that are held at a time.
        draft_head: The output head for features, if it is another than `lm_head`.

    Returns:
        The loss and its unweighted terms: `serial_feature`, `serial_ce`, `parallel_i_feature` and so on, each
        averaged over the positions it has.

    Raises:
        ValueError: The output lacks the features of a head.
    """
    predictions = predictions_of(output, weights or LossWeights())
    selected = select_positions(predictions, hidden_states, loss_mask, position_ids)
    if counts is None:
        counts = selected.valid.sum(dim=1)
    term_weights = [{name: weight for name, weight in p.weights.items() if weight} for p, _ in predictions]
    loss, means = _ChunkedLoss.apply(
        selected.features, selected.targets, selected.valid, counts, term_weights, lm_head, draft_head or lm_head,
        chunk_size,
    )  # fmt: skip
    names: list[str] = []
    for (predictor, _), own in zip(predictions, term_weights, strict=True):
        names += [f"{predictor.name}_{name}" for name in own]
    return loss, dict(zip(names, means.unbind(), strict=True))


def pieces(length: int, size: int) -> Iterator[slice]:
    """Returns slices of `size` that cover `length` entries."""
    return (slice(start, start + size) for start in range(0, length, size))


class _ChunkedLoss(torch.autograd.Function):
    """The weighted sum of all terms, and the unweighted terms `(T,)`; the forward pass computes the gradient, too."""

    @staticmethod
    def forward(
        ctx: Any,
        features: torch.Tensor,
        targets: torch.Tensor,
        valid: torch.Tensor,
        counts: torch.Tensor,
        term_weights: list[dict[str, float]],
        lm_head: LMHead,
        draft_head: LMHead,
        chunk_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # In float32 also for half-precision features: divided by the number of positions it would underflow.
        gradient = torch.zeros_like(features, dtype=torch.float32)
        shares = 1 / counts.clamp(min=1).to(torch.float32)
        zero = shares.new_zeros(())
        means = [dict.fromkeys(weights, zero) for weights in term_weights]
        for piece in pieces(len(targets), chunk_size):
            target = Readout(targets[piece], lm_head)
            for index, weights in enumerate(term_weights):
                terms = _piece_terms(features[index, piece], target, valid[index, piece], list(weights), draft_head)
                for name, (value, term_gradient) in terms.items():
                    means[index][name] = means[index][name] + value * shares[index]
                    gradient[index, piece] += term_gradient * (weights[name] * shares[index])
        loss = zero
        for weights, own in zip(term_weights, means, strict=True):
            loss = sum((weights[name] * mean for name, mean in own.items()), loss)
        ctx.save_for_backward(gradient)
        ctx.dtype = features.dtype
        flat = torch.stack([zero, *(mean for own in means for mean in own.values())])[1:]  # there may be none
        ctx.mark_non_differentiable(flat)
        return loss, flat

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_outputs[0]).to(ctx.dtype), None, None, None, None, None, None, None


def _piece_terms(
    features: torch.Tensor, target: Readout, valid: torch.Tensor, names: list[str], draft_head: LMHead
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns, for each of these terms of a piece, its sum over the positions and the gradient `(n, H)` of that."""
    found = {}
    with torch.enable_grad():
        leaf = features.detach().float().requires_grad_()
        prediction = Readout(leaf, lambda states: draft_head(states.to(features.dtype)))
        for name in names:
            value = (TERMS[name](prediction, target) * valid.float()).sum()
            # Neither weight nor average has been applied, and the terms go through the head one by one: it computes in
            # its own precision, in which the scaled gradient would underflow.
            (gradient,) = torch.autograd.grad(value, leaf, retain_graph=name != names[-1])
            found[name] = value.detach(), gradient
    return found
