"""The random noise by which the next tokens will be sampled, seen in advance.

`torch.multinomial` draws one token by the exponential race: with independent exponential variates `e`, the arg-max of
`p / e` is distributed as `p`. Its logarithm is `log p - log e`, and `-log e` is Gumbel noise (E. J. Gumbel, 1954).
Under given noise sampling is thus an arg-max, and a drafter that adds the noise of the coming draws to its own scores
ranks first what the target will draw wherever the two agree about it, at any temperature. What the target draws does
not change.
"""

from collections import deque

import torch


# Whose generators can be copied. Elsewhere drafts are made without the noise: just as exact, with
# fewer tokens accepted.
_DEVICE_TYPES = ("cpu", "cuda", "xpu")


class UpcomingNoise:
    """
    The noise of the next draws of `torch.multinomial(probabilities, 1)` from float32 `(B, V)` on `device`.

    Noise that was seen and not used yet is the noise of later draws, and is kept for them.

    Args:
        batch_size: Rows that are drawn from, `B`.
        vocab_size: Tokens that are drawn from, `V`.
        device: Of the probabilities.
    """

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device):
        self._shape, self.device = (batch_size, vocab_size), device
        self._generator = torch.Generator(device) if device.type in _DEVICE_TYPES else None
        # The state of the generator before each draw that is known, and the draw `(B, V)`.
        self._known: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def peek(self, num_draws: int) -> torch.Tensor | None:
        """
        Returns the noise `(B, num_draws, V)` of the next draws, `None` where the device's generator cannot be copied.
        The draws are made by a copy: the generator itself, which other threads may be using, is not touched.
        """
        if self._generator is None:
            return None
        state = self._state_of_device()
        # Whatever else drew a number meanwhile, the state tells.
        while self._known and not torch.equal(self._known[0][0], state):
            self._known.popleft()
        if not self._known:
            self._generator.set_state(state)
        while len(self._known) < num_draws:
            state = self._generator.get_state()
            draw = torch.empty(self._shape, dtype=torch.float32, device=self.device)
            self._known.append((state, draw.exponential_(generator=self._generator).log_().neg_()))
        return torch.stack([noise for _, noise in self._known][:num_draws], dim=1)

    def _state_of_device(self) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(self.device).get_rng_state(self.device)
