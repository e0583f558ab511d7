"""The temperature under which a drafter's distributions make what the target says most likely."""

import math

import torch


# Close enough for the parabola through three of them to be the curve: the loss is smooth in the log of T.
LOG_TEMPERATURES = torch.linspace(math.log(0.1), math.log(3.0), 25, dtype=torch.float64, device="cpu")
_TEMPERATURES = LOG_TEMPERATURES.exp().tolist()


def likelihood_losses(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns `(n, G)`: `-log softmax(logits / T)` of tokens `(n,)` under each temperature, for logits `(n, V)`."""
    # No device has to know float64: MPS does not.
    logits = logits.float()
    chosen = logits.gather(1, tokens.to(logits.device)[:, None]).squeeze(1)
    losses = [(logits / temperature).logsumexp(dim=-1) - chosen / temperature for temperature in _TEMPERATURES]
    return torch.stack(losses, dim=1)


def best_temperature(curve: torch.Tensor) -> float:
    """Returns the temperature at the lowest point of a curve `(G,)` over the grid."""
    lowest = int(curve.argmin())
    if not 0 < lowest < len(curve) - 1:
        return float(LOG_TEMPERATURES[lowest].exp())
    left, middle, right = curve[lowest - 1 : lowest + 2].tolist()
    bend = left - 2 * middle + right
    shift = (left - right) / (2 * bend) if bend > 0 else 0.0
    step = LOG_TEMPERATURES[1] - LOG_TEMPERATURES[0]
    return float((LOG_TEMPERATURES[lowest] + shift * step).exp())
