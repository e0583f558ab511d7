"""The random draws of the target's tokens, known before they are made.

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

from .tree.uploads import upload


# Devices whose generators can be copied. On others, drafts are made without the noise. The text is the same, and fewer
# drafts are accepted.
_DEVICE_TYPES = ("cpu", "cuda", "xpu")
# Limit of the draws that are kept for slower rows, in bytes, and the number of draws that are kept at any size.
_KEPT_BYTES = 256 << 20
_MIN_KEPT = 16
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
    probabilities = torch.linspace(0.1, 1.0, 5000, device=device).softmax(dim=0)
    probabilities = probabilities.expand(2, -1).contiguous()
    generator, other = (torch.Generator(device).manual_seed(0) for _ in range(2))
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    exponentials = torch.empty_like(probabilities).exponential_(generator=other)
    is_same = torch.equal((probabilities / exponentials).argmax(dim=1, keepdim=True), drawn)
    return is_same and torch.equal(generator.get_state(), other.get_state())


def sample_by_exponentials(probabilities: torch.Tensor, exponentials: torch.Tensor) -> torch.Tensor:
    """
    Returns the tokens `(..., 1)` that win the race of probabilities and exponential variates, both `(..., V)`;
    [`NO_TOKEN`] if no probability is positive.
    """
    tokens = (probabilities / exponentials).argmax(dim=-1, keepdim=True)
    return tokens.where(probabilities.gather(-1, tokens) > 0, NO_TOKEN)


class TokenDraws:
    """
    The draws of a generation: of each, the exponential variates `(B, V)`.

    Plain decoding draws the k-th new token of all rows at once. So a row's k-th token uses the row's part of the k-th
    draw, whenever the row gets there, and the same seed samples the same text. A row takes the noise of each token
    exactly once, whatever was drafted. So the drafter may know all of it.

    Draws that were made are kept until the slowest row has taken them; [`max_lead`] limits their number. Draws that
    were only previewed wait in a second queue:

    - Without `reserve` a copy of the device's generator previews them. They are dropped if other code has drawn from
      the generator since, because plain decoding would then draw other numbers, too.
    - With `reserve` they are taken from the device's generator, and always used; [`return_unused`] gives the rest
      back. This is needed if rows may be at different steps, or if several tokens are drawn at once: otherwise the
      noise of a row would depend on its own accepted drafts.
    """

    def __init__(self, batch_size: int, reserve: bool):
        self._batch_size, self._reserve = batch_size, reserve
        # Of the newest probabilities: their number `V`, device and dtype.
        self._kind: tuple[int, torch.device, torch.dtype] | None = None
        self._is_known = False  # whether draws of this kind can be previewed
        self._vocab_size, self._device = 0, torch.device("cpu")
        self._first = 0  # step of the oldest draw that is kept
        self._made: deque[torch.Tensor] = deque()
        # For each previewed draw: the generator's state before it, and its variates.
        self._previewed: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._copy = torch.Generator()  # of the device's generator, after the newest previewed draw
        self._state_after: torch.Tensor | None = None  # the device's generator after the newest reserved draw

    @property
    def max_lead(self) -> float:
        """Most tokens by which a row may be ahead of the slowest one."""
        size = 4 * self._batch_size * self._vocab_size  # float32
        return max(_MIN_KEPT, _KEPT_BYTES // size) if self._is_known else float("inf")

    def draw(self, scores: torch.Tensor, steps: Sequence[int | None]) -> torch.Tensor:
        """
        Draws a token `(B, 1)` for every row, as `torch.multinomial` draws it in plain decoding. If no probability of a
        row is positive, it may be [`NO_TOKEN`], which the host checks when it reads the tokens.

        Args:
            scores (`(B, V)`): Processed logits.
            steps: Tokens that each row has drawn before; `None` for rows that take none, whose scores are not read.
        """
        taking = [step for step in steps if step is not None]
        if len(taking) < len(steps):
            idle = upload([[step is None] for step in steps], scores.device)
            scores = scores.masked_fill(idle, 0.0)
        probabilities = scores.softmax(dim=-1)
        kind = probabilities.shape[1], probabilities.device, probabilities.dtype
        if kind != self._kind:
            self._begin(kind, max(taking))
        if not self._is_known:
            with DRAWING:
                return torch.multinomial(probabilities, num_samples=1)
        self.advance_generator(max(taking) + 1)
        used = [max(taking) if step is None else step for step in steps]
        draws = [self._made[step - self._first] for step in used]
        exponentials = draws[0]
        if any(other is not exponentials for other in draws):
            exponentials = torch.stack([of_step[row] for row, of_step in enumerate(draws)])
        return sample_by_exponentials(probabilities, exponentials)

    def advance_generator(self, num_steps: int) -> None:
        """Makes those of the first `num_steps` draws that are missing, which advances the device's generator."""
        if self._is_known:
            with DRAWING:
                while self._first + len(self._made) < num_steps:
                    self._made.append(self._make())

    def peek(
        self, num_draws: int, vocab_size: int, steps: Sequence[int | None], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """
        Returns the Gumbel noise `(B, num_draws, K)` of each row's next draws, for `token_ids` `(K,)` or all tokens;
        `None` if it is unknown, as where the caller knows another number of tokens. `steps` is as in [`draw`]. Rows
        that take no token get any draws.
        """
        exponentials = self._next(num_draws, vocab_size, steps, token_ids)
        return None if exponentials is None else exponentials.log().neg_()

    def take(self, num_draws: int, vocab_size: int, steps: Sequence[int | None]) -> torch.Tensor | None:
        """
        Returns the exponential variates `(B, num_draws, V)` of the same draws, to choose several tokens at once, or
        `None` also if a row would be too far ahead. Call [`advance_generator`] when the tokens are chosen.
        """
        known = [step for step in steps if step is not None]
        is_far = max(known) + num_draws - min(known) > self.max_lead
        return None if is_far else self._next(num_draws, vocab_size, steps)

    def forget(self, steps: Sequence[int | None]) -> None:
        """Drops the draws that all rows have used. `steps` is as in [`draw`], after the draw."""
        num_used = min((step for step in steps if step is not None), default=0)
        while self._first < num_used and self._made:
            self._made.popleft()
            self._first += 1

    def return_unused(self) -> None:
        """Leaves the device's generator as plain decoding leaves it, unless other code has drawn since."""
        with DRAWING:
            if self._reserve and self._previewed and self._is_at(self._state_after):
                _set_state_of(self._device, self._previewed[0][0])
            self._previewed.clear()

    def _begin(self, kind: tuple[int, torch.device, torch.dtype], step: int) -> None:
        """Begins draws of another kind."""
        # In the middle of a text that takes a custom processor, with which all rows take the same steps: no draw is
        # kept for a slower row.
        self._kind, (self._vocab_size, self._device, dtype) = kind, kind
        self._is_known = dtype == torch.float32 and can_preview_multinomial(self._device)
        self._first = step
        self._made.clear()
        self._previewed.clear()
        self._copy = torch.Generator(self._device if self._is_known else "cpu")

    def _next(
        self, num_draws: int, vocab_size: int, steps: Sequence[int | None], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        if not self._is_known or self._vocab_size != vocab_size:
            return None
        # 1. The draws from the slowest row's next one to the fastest row's last one. Two draws each of rows at 3 and 5
        # are the draws 3 to 6.
        slowest = min(step for step in steps if step is not None)
        starts = [(slowest if step is None else step) - self._first for step in steps]
        used = range(min(starts), max(starts) + num_draws)
        self._preview(used.stop - len(self._made))
        draws = [*self._made, *(variates for _, variates in self._previewed)][used.start : used.stop]
        if token_ids is not None:
            draws = [of_draw.index_select(1, token_ids.to(self._device)) for of_draw in draws]
        # 2. Of each row its own: 3 and 4, 5 and 6.
        if min(starts) == max(starts):
            return torch.stack(draws, dim=1)
        of_rows = []
        for row, start in enumerate(starts):
            own = draws[start - used.start :][:num_draws]
            of_rows.append(torch.stack([of_draw[row] for of_draw in own]))
        return torch.stack(of_rows)

    def _preview(self, num_draws: int) -> None:
        """Previews the draws that come next, up to `num_draws` of them."""
        if not self._reserve:
            self._drop_outdated()
            if not self._previewed:
                self._copy.set_state(_state_of(self._device))
            while len(self._previewed) < num_draws:
                state = self._copy.get_state()
                self._previewed.append((state, self._empty().exponential_(generator=self._copy)))
            return
        with DRAWING:
            while len(self._previewed) < num_draws:
                state = _state_of(self._device)
                if self._state_after is not None and not torch.equal(state, self._state_after):
                    # Other code has drawn since: draws from before that are not given back.
                    self._previewed = deque((state, variates) for _, variates in self._previewed)
                self._previewed.append((state, self._empty().exponential_()))
                self._state_after = _state_of(self._device)

    def _make(self) -> torch.Tensor:
        """Makes the next draw, and leaves the device's generator as `torch.multinomial` would, or ahead of it."""
        if not self._reserve:
            self._drop_outdated()
        if not self._previewed:
            return self._empty().exponential_()
        _, variates = self._previewed.popleft()
        if self._reserve:
            return variates
        if self._device.type != "cpu":
            self._empty().exponential_()
        else:
            # Making random numbers is slow on a CPU, so the state is set instead.
            state = self._previewed[0][0] if self._previewed else self._copy.get_state()
            torch.set_rng_state(state)
        return variates

    def _drop_outdated(self) -> None:
        """Drops previewed draws that will not be made, because other code has drawn meanwhile."""
        while self._previewed and not self._is_at(self._previewed[0][0]):
            self._previewed.popleft()

    def _is_at(self, state: torch.Tensor | None) -> bool:
        """Whether the device's generator is in this state."""
        return state is not None and torch.equal(_state_of(self._device), state)

    def _empty(self) -> torch.Tensor:
        return torch.empty((self._batch_size, self._vocab_size), dtype=torch.float32, device=self._device)


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
