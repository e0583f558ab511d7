"""Sampling from the most probable tokens without sorting the vocabulary."""

import torch


def sample_nucleus(
    logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """
    Samples a token from each row's nucleus: the smallest set of most probable tokens that has `top_p` of the mass.

    A token is drawn from the whole distribution and drawn again while those more probable than it already have
    `top_p`. That takes 1 / `top_p` draws on average, where sorting a large vocabulary costs more than the target.

    Args:
        logits (`(B, V)`): Of the target.
        temperature: Divides the logits.
        top_p: Mass of the nucleus, in (0, 1].
        generator: Where the randomness comes from; on the logits' device.

    Returns:
        Tokens `(B,)`.
    """
    probabilities = (logits.float() / temperature).softmax(dim=-1)
    tokens = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    waiting = torch.arange(len(logits), device=logits.device)
    while len(waiting):
        rows = probabilities[waiting]
        drawn = _draw(rows, generator)
        tokens[waiting] = drawn
        above = torch.where(rows > rows.gather(1, drawn[:, None]), rows, 0).sum(dim=-1)
        waiting = waiting[above >= top_p]
    return tokens


def _draw(probabilities: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Draws a token `(B,)` from each row of probabilities `(B, V)`."""
    # In float32, as not every device has float64: the share of a token is off by at most a rounding error of 1.
    cumulative = probabilities.cumsum(dim=-1)
    uniform = torch.rand(len(probabilities), 1, device=probabilities.device, generator=generator)
    # Of `1 - uniform`, which is never 0: a token of no probability is never drawn.
    threshold = (1 - uniform) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold).squeeze(-1).clamp(max=probabilities.shape[1] - 1)
