"""The random noise by which the next tokens will be sampled, seen in advance.

`torch.multinomial` draws one token by the exponential race: with independent exponential variates `e`, the arg-max of
`p / e` is distributed as `p`. Its logarithm is `log p - log e`, and `-log e` is Gumbel noise (E. J. Gumbel, 1954).
Under given noise sampling is thus an arg-max, and a drafter that adds the noise of the coming draws to its own scores
ranks first what the target will draw wherever the two agree about it, at any temperature. What the target draws does
not change: the generator is put back.
"""

import torch


# Whose generators can be put back device by device. Elsewhere drafts are made without the noise: just as exact, with
# fewer tokens accepted.
_DEVICE_TYPES = ("cpu", "cuda", "xpu")


def peek_gumbel_noise(batch_size: int, vocab_size: int, num_draws: int, device: torch.device) -> torch.Tensor | None:
    """
    Returns the noise `(B, num_draws, V)` of the next draws of `torch.multinomial(probabilities, 1)` from float32
    `(B, V)` on `device`, `None` where the device's generator cannot be put back. The state of the random number
    generators is as before afterwards.
    """
    if device.type not in _DEVICE_TYPES:
        return None
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        draws = [torch.empty(batch_size, vocab_size, device=device).exponential_() for _ in range(num_draws)]
    return torch.stack(draws, dim=1).log_().neg_()
