"""The random noise by which the next tokens will be sampled, seen in advance.

`torch.multinomial` draws one token by the exponential race: with independent exponential variates `e`, the arg-max of
`p / e` is distributed as `p`. Its logarithm is `log p - log e`, and `-log e` is Gumbel noise (E. J. Gumbel, 1954).
Under given noise sampling is thus an arg-max, and a drafter that adds the noise of the coming draws to its own scores
ranks first what the target will draw wherever the two agree about it, at any temperature. What the target draws does
not change.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


# Whose generators can be copied. Elsewhere drafts are made without the noise: just as exact, with
# fewer tokens accepted.
_DEVICE_TYPES = ("cpu", "cuda", "xpu")
# Bytes of noise that is kept for the rows that are behind, and draws that are kept however large they are.
_KEPT_BYTES = 256 << 20
_LEAST_KEPT = 16
# Held where a device's generator is put forward: of threads that decode at once none takes numbers of another.
_ADVANCING = threading.Lock()


@dataclass
class NoiseOfDraw:
    """
    The noise of one draw for all rows.

    Attributes:
        race (`(B, V)`): The exponential variates.
    """

    race: torch.Tensor

    @cached_property
    def gumbel(self) -> torch.Tensor:
        """The Gumbel noise `(B, V)`."""
        return self.race.log().neg_()


class UpcomingNoise:
    """
    The noise of the next draws of `torch.multinomial(probabilities, 1)` from float32 `(B, V)` on `device`.

    Noise that was seen and not used yet is the noise of later draws, and is kept for them.

    Args:
        batch_size: Rows that are drawn from, `B`.
        vocab_size: Tokens that are drawn from, `V`.
        device: Of the probabilities.

    Attributes:
        is_told: Whether the device's generator can be copied.
    """

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device):
        self.shape, self.device = (batch_size, vocab_size), device
        self.is_told = device.type in _DEVICE_TYPES
        self._copy = torch.Generator(device if self.is_told else "cpu")
        # The state of the generator before each draw that is known, and the draw.
        self._known: deque[tuple[torch.Tensor, NoiseOfDraw]] = deque()

    def peek(self, num_draws: int) -> torch.Tensor | None:
        """Returns the Gumbel noise `(B, num_draws, V)` of the next draws, `None` where it is not told."""
        if not self.is_told:
            return None
        return torch.stack([draw.gumbel for draw in self.look_ahead(num_draws)], dim=1)

    def look_ahead(self, num_draws: int) -> list[NoiseOfDraw]:
        """
        Returns the noise of the next draws, where it is told. They are made by a copy of the generator: the generator
        itself, which other threads may be using, is not touched.
        """
        state = self._forget_used()
        if not self._known:
            self._copy.set_state(state)
        while len(self._known) < num_draws:
            state = self._copy.get_state()
            race = torch.empty(self.shape, dtype=torch.float32, device=self.device)
            self._known.append((state, NoiseOfDraw(race.exponential_(generator=self._copy))))
        return [draw for _, draw in self._known][:num_draws]

    def draw(self) -> NoiseOfDraw:
        """
        Returns the noise of the next draw, and leaves the device's generator as the next `torch.multinomial` would.

        Where the noise was seen it is not made again, which takes as long as the draw itself: the generator is put
        where it would be. What another thread draws from it within these lines is forgotten.
        """
        with _ADVANCING:
            self._forget_used()
            if self._known:
                _, draw = self._known.popleft()
                self._advance_device()
                return draw
            return NoiseOfDraw(torch.empty(self.shape, dtype=torch.float32, device=self.device).exponential_())

    def _advance_device(self) -> None:
        """Puts the device's generator before the first of the known draws, or after the last that was known."""
        state = self._known[0][0] if self._known else self._copy.get_state()
        if self.device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self.device).set_rng_state(state, self.device)

    def _forget_used(self) -> torch.Tensor:
        """Forgets what is not to be drawn any more; returns the state of the device's generator."""
        state = self._state_of_device()
        # Whatever else drew a number meanwhile, the state tells.
        while self._known and not torch.equal(self._known[0][0], state):
            self._known.popleft()
        return state

    def _state_of_device(self) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(self.device).get_rng_state(self.device)


class NoiseOfRows:
    """
    The noise of rows that are at different steps. Plain decoding draws the k-th new token of all rows at once, so the
    noise of a row's k-th token is that row of the k-th draw, whenever the row comes to it. The same seed then samples
    the same text as in plain decoding; and as a row takes each noise exactly once, whatever was drafted, all of it may
    be known to the drafter.

    Draws are kept until the last row has taken them. [`most_ahead`] bounds how many that are.

    Args:
        upcoming: The noise of the draws to come, which is told.
        first_step: How many tokens all rows have drawn before.
    """

    def __init__(self, upcoming: UpcomingNoise, first_step: int = 0):
        self._upcoming, self._num_forgotten = upcoming, first_step
        self._drawn: deque[NoiseOfDraw] = deque()

    @property
    def most_ahead(self) -> int:
        """By how many tokens a row may be ahead of the slowest one."""
        batch_size, vocab_size = self._upcoming.shape
        return max(_LEAST_KEPT, _KEPT_BYTES // (8 * batch_size * vocab_size))  # float32, race and Gumbel noise

    def draw(self, probabilities: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """
        Returns a token `(B, 1)` for each row, as `torch.multinomial` draws it in plain decoding.

        Args:
            probabilities (`(B, V)`): Of the tokens.
            steps: How many tokens each row has drawn before.

        Raises:
            RuntimeError: The probabilities of a row are none, as `torch.multinomial` says it.
        """
        while self._num_forgotten + len(self._drawn) <= max(steps):
            self._drawn.append(self._upcoming.draw())
        draws = [self._drawn[step - self._num_forgotten] for step in steps]
        race = draws[0].race
        if any(draw is not draws[0] for draw in draws):
            race = torch.stack([draw.race[row] for row, draw in enumerate(draws)])
        tokens = (probabilities / race).argmax(dim=-1, keepdim=True)
        if not bool((probabilities.gather(1, tokens) > 0).all()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return tokens

    def peek(self, num_draws: int, steps: Sequence[int]) -> torch.Tensor:
        """Returns the Gumbel noise `(B, num_draws, V)` of the next draws of each row, which has drawn `steps` before."""
        first = self._num_forgotten
        num_new = max(steps) + num_draws - first - len(self._drawn)
        known = [*self._drawn, *(self._upcoming.look_ahead(num_new) if num_new > 0 else [])]
        if min(steps) == max(steps):
            return torch.stack([draw.gumbel for draw in known[steps[0] - first :][:num_draws]], dim=1)
        of_rows = [
            known[step - first + place].gumbel[row] for row, step in enumerate(steps) for place in range(num_draws)
        ]
        return torch.stack(of_rows).unflatten(0, (len(steps), num_draws))

    def forget(self, num_steps: int) -> None:
        """Forgets the first `num_steps` draws, which all rows have taken."""
        while self._num_forgotten < num_steps and self._drawn:
            self._drawn.popleft()
            self._num_forgotten += 1
