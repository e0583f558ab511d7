"""The random noise by which the next tokens will be sampled, seen in advance.

`torch.multinomial` draws one token by the exponential race: with independent exponential variates `e`, the arg-max of
`p / e` is distributed as `p`. Its logarithm is `log p - log e`, and `-log e` is Gumbel noise (E. J. Gumbel, 1954).
Under given noise sampling is thus an arg-max, and a drafter that adds the noise of the coming draws to its own scores
ranks first what the target will draw wherever the two agree about it, at any temperature. What the target draws does
not change.
"""

import torch


# Whose generators can be copied. Elsewhere drafts are made without the noise: just as exact, with
# fewer tokens accepted.
_DEVICE_TYPES = ("cpu", "cuda", "xpu")


def peek_gumbel_noise(batch_size: int, vocab_size: int, num_draws: int, device: torch.device) -> torch.Tensor | None:
    """
    Returns the noise `(B, num_draws, V)` of the next draws of `torch.multinomial(probabilities, 1)` from float32
    `(B, V)` on `device`, `None` where the device's generator cannot be copied. The draws are made by a copy: the
    generator itself, which other threads may be using, is not touched.
    """
    if device.type not in _DEVICE_TYPES:
        return None
    generator = torch.Generator(device)
    generator.set_state(
        torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    )
    draws = torch.empty(num_draws, batch_size, vocab_size, dtype=torch.float32, device=device)
    for draw in draws:
        draw.exponential_(generator=generator)
    return draws.log_().neg_().transpose(0, 1)
