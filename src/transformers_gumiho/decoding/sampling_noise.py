"""The random noise of the next sampled tokens, known before they are drawn.

`torch.multinomial` draws one token by the exponential race: with independent exponential variates `e`, the arg-max of
`p / e` is distributed as `p`. The logarithm of `p / e` is `log p - log e`, and `-log e` is Gumbel noise (E. J. Gumbel,
1954). So with given noise, sampling is an arg-max. A drafter adds the noise of the coming draws to its own scores. At
any temperature it then ranks first the token that the target will draw, if both agree on the probabilities. The
target's draws do not change.
"""

import threading
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

import torch


# Devices whose generators can be copied. On others, drafts are made without the noise. The text is the same, and fewer
# drafts are accepted.
_DEVICE_TYPES = ("cpu", "cuda", "xpu")
# Limit of the noise that is kept for slower rows, in bytes, and the number of draws that are kept at any size.
_KEPT_BYTES = 256 << 20
_LEAST_KEPT = 16
# Held while a token is drawn, because drawing may read and set the state of the device's generator. Threads that
# decode at the same time then take different numbers.
DRAWING = threading.Lock()
# Drawn if no token of a row has a positive probability.
NO_TOKEN = -1


@lru_cache(maxsize=16)
def can_preview_multinomial(device: torch.device) -> bool:
    """Whether the device's generator can be copied, and `torch.multinomial` draws by the exponential race there."""
    if device.type not in _DEVICE_TYPES:
        return False
    probabilities = torch.linspace(0.1, 1.0, 5000, device=device).softmax(dim=0).expand(2, -1).contiguous()
    generator, other = (torch.Generator(device).manual_seed(0) for _ in range(2))
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    race = torch.empty_like(probabilities).exponential_(generator=other)
    is_same = torch.equal((probabilities / race).argmax(dim=1, keepdim=True), drawn)
    return is_same and torch.equal(generator.get_state(), other.get_state())


def _state_of(device: torch.device) -> torch.Tensor:
    """Returns the state of the device's generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_state_of(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def decide_race(probabilities: torch.Tensor, race: torch.Tensor) -> torch.Tensor:
    """
    Returns the tokens `(..., 1)` that win the race of probabilities and exponential variates, both `(..., V)`;
    [`NO_TOKEN`] if no probability is positive.
    """
    tokens = (probabilities / race).argmax(dim=-1, keepdim=True)
    return tokens.where(probabilities.gather(-1, tokens) > 0, NO_TOKEN)


class UpcomingNoise:
    """
    The noise of the next draws of `torch.multinomial(probabilities, 1)` with float32 probabilities `(B, V)`. A copy of
    the device's generator previews it, as the exponential variates of each draw.

    Previewed noise is kept for the later draws that use it. It is dropped if other code has drawn from the generator
    since, because plain decoding would then draw other numbers, too.

    Args:
        batch_size: Number of rows, `B`.
        vocab_size: Number of tokens, `V`.
        device: Device of the probabilities, for which [`can_preview_multinomial`] holds.
    """

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device):
        self.shape, self.device = (batch_size, vocab_size), device
        self._copy = torch.Generator(device)
        # For each previewed draw: the generator's state before it, and its variates.
        self._known: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def look_ahead(self, num_draws: int) -> list[torch.Tensor]:
        """Returns the variates `(B, V)` of each of the next draws."""
        self._forget_used()
        if not self._known:
            self._copy.set_state(_state_of(self.device))
        while len(self._known) < num_draws:
            state = self._copy.get_state()
            self._known.append((state, self._empty().exponential_(generator=self._copy)))
        return [race for _, race in self._known][:num_draws]

    def draw(self) -> torch.Tensor:
        """
        Returns the variates `(B, V)` of the next draw, and leaves the device's generator as `torch.multinomial` would.
        The caller holds [`DRAWING`].
        """
        self._forget_used()
        if not self._known:
            return self._empty().exponential_()
        _, race = self._known.popleft()
        if self.device.type != "cpu":
            self._empty().exponential_()
        else:
            # Making random numbers is slow on a CPU, so the state is set instead.
            torch.set_rng_state(self._known[0][0] if self._known else self._copy.get_state())
        return race

    def release(self) -> None:
        """Leaves the device's generator as plain decoding leaves it."""

    def _forget_used(self) -> None:
        """Drops previewed noise that will not be drawn."""
        state = _state_of(self.device)
        # The state shows whether anything else drew a number meanwhile.
        while self._known and not torch.equal(self._known[0][0], state):
            self._known.popleft()

    def _empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=torch.float32, device=self.device)


class ReservedNoise(UpcomingNoise):
    """
    The same for rows that diverge, and for several draws at once. Previewed noise is always used, even if other code
    draws in between. Otherwise the noise of a row would depend on how many of its drafts were accepted, and so on the
    noise itself. The noise is taken from the device's generator when it is previewed. Unused noise is given back at
    the end, unless other code has drawn since.
    """

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device):
        super().__init__(batch_size, vocab_size, device)
        self._state_after: torch.Tensor | None = None  # state after the newest previewed draw

    def look_ahead(self, num_draws: int) -> list[torch.Tensor]:
        """Returns the variates `(B, V)` of each of the next draws."""
        with DRAWING:
            while len(self._known) < num_draws:
                state = _state_of(self.device)
                if self._state_after is not None and not torch.equal(state, self._state_after):
                    # Other code has drawn since: noise from before that is not given back.
                    self._known = deque((state, race) for _, race in self._known)
                self._known.append((state, self._empty().exponential_()))
                self._state_after = _state_of(self.device)
        return [race for _, race in self._known][:num_draws]

    def draw(self) -> torch.Tensor:
        """Returns the variates `(B, V)` of the next draw. The caller holds [`DRAWING`]."""
        return self._known.popleft()[1] if self._known else self._empty().exponential_()

    def release(self) -> None:
        """Leaves the device's generator as plain decoding leaves it."""
        with DRAWING:
            if (
                self._known
                and self._state_after is not None
                and torch.equal(_state_of(self.device), self._state_after)
            ):
                _set_state_of(self.device, self._known[0][0])
            self._known.clear()


class PerRowDraws:
    """
    The noise of rows that may be at different steps.

    Plain decoding draws the k-th new token of all rows at once. So a row's k-th token uses the row's part of the k-th
    draw, whenever the row gets there, and the same seed samples the same text as plain decoding. A row takes the noise
    of each token exactly once, whatever was drafted. So the drafter may know all of it.

    Draws are kept until the slowest row has taken them. [`most_ahead`] limits their number.

    Args:
        upcoming: The noise of the coming draws.
        first_step: Number of tokens that all rows have drawn before.
    """

    def __init__(self, upcoming: UpcomingNoise, first_step: int = 0):
        self._upcoming, self._num_forgotten = upcoming, first_step
        self._drawn: deque[torch.Tensor] = deque()

    @property
    def most_ahead(self) -> int:
        """Most tokens by which a row may be ahead of the slowest one."""
        batch_size, vocab_size = self._upcoming.shape
        return max(_LEAST_KEPT, _KEPT_BYTES // (4 * batch_size * vocab_size))  # float32

    def draw(self, probabilities: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """
        Returns a token `(B, 1)` for each row, as `torch.multinomial` draws it in plain decoding. If no probability of
        a row is positive, it is [`NO_TOKEN`], which the host checks when it reads the tokens.

        Args:
            probabilities (`(B, V)`): Probabilities of the tokens, float32.
            steps: Number of tokens that each row has drawn before.
        """
        self.settle(max(steps) + 1)
        races = [self._drawn[step - self._num_forgotten] for step in steps]
        race = races[0]
        if any(other is not race for other in races):
            race = torch.stack([of_step[row] for row, of_step in enumerate(races)])
        return decide_race(probabilities, race)

    def settle(self, num_steps: int) -> None:
        """Makes those of the first `num_steps` draws that are missing, which advances the generator."""
        with DRAWING:
            while self._num_forgotten + len(self._drawn) < num_steps:
                self._drawn.append(self._upcoming.draw())

    def peek(self, num_draws: int, steps: Sequence[int], token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """
        Returns the Gumbel noise `(B, num_draws, K)` of each row's next draws, after its `steps` earlier ones, for the
        tokens `token_ids` `(K,)` or for all.
        """
        return self.take(num_draws, steps, token_ids).log().neg_()

    def take(self, num_draws: int, steps: Sequence[int], token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """
        Returns the exponential variates `(B, num_draws, K)` of the same draws. A caller that chooses tokens by them
        calls [`settle`] with the number of tokens that were kept.
        """
        first = self._num_forgotten
        num_new = max(steps) + num_draws - first - len(self._drawn)
        known = [*self._drawn, *(self._upcoming.look_ahead(num_new) if num_new > 0 else [])]
        starts = [step - first for step in steps]
        if token_ids is not None:
            used = range(min(starts), max(starts) + num_draws)
            token_ids = token_ids.to(known[0].device)
            known = [race.index_select(1, token_ids) if place in used else race for place, race in enumerate(known)]
        if min(starts) == max(starts):
            return torch.stack(known[starts[0] :][:num_draws], dim=1)
        of_rows = [known[start + place][row] for row, start in enumerate(starts) for place in range(num_draws)]
        return torch.stack(of_rows).unflatten(0, (len(steps), num_draws))

    def release(self) -> None:
        """Leaves the device's generator as plain decoding leaves it, once all rows have their tokens."""
        self._upcoming.release()

    def forget(self, num_steps: int) -> None:
        """Drops the first `num_steps` draws, which all rows have taken."""
        while self._num_forgotten < num_steps and self._drawn:
            self._drawn.popleft()
            self._num_forgotten += 1
