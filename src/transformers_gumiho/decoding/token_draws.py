"""Sampling of the target's tokens, with the random numbers of plain decoding."""

from collections.abc import Sequence

import torch

from ..uploads import upload
from .sampling_noise import DRAWING, PerRowDraws, ReservedNoise, UpcomingNoise, can_preview_multinomial


class TokenDraws:
    """
    The draws of a generation.

    Args:
        reserves_noise: Whether previewed noise is always used ([`ReservedNoise`]). Needed if rows may be at different
            steps, or if several tokens are drawn at once.
    """

    def __init__(self, reserves_noise: bool):
        self._reserves_noise = reserves_noise
        self._drawn_like: tuple[torch.Size, torch.device, torch.dtype] | None = None  # the newest tokens
        self._noise: PerRowDraws | None = None  # where it can be previewed

    @property
    def most_ahead(self) -> float:
        """Most tokens by which a row may be ahead of the slowest one."""
        return float("inf") if self._noise is None else self._noise.most_ahead

    def draw(self, scores: torch.Tensor, steps: Sequence[int | None]) -> torch.Tensor:
        """
        Draws a token `(B, 1)` for every row.

        Args:
            scores (`(B, V)`): Processed logits.
            steps: Number of tokens that each row has drawn before; `None` for rows that take no token. Their scores
                are not read.
        """
        taking = [step for step in steps if step is not None]
        if len(taking) < len(steps):
            idle = upload([[step is None] for step in steps], scores.device)
            scores = scores.masked_fill(idle, 0.0)
        probabilities = scores.softmax(dim=-1)
        drawn_like = probabilities.shape, probabilities.device, probabilities.dtype
        if drawn_like != self._drawn_like:
            # A processor may change the width or the precision of the scores.
            self._drawn_like, self._noise = drawn_like, self._noise_of(probabilities, max(taking))
        if self._noise is None:
            with DRAWING:
                return torch.multinomial(probabilities, num_samples=1)
        return self._noise.draw(probabilities, [max(taking) if step is None else step for step in steps])

    def peek(
        self, num_draws: int, vocab_size: int, steps: Sequence[int | None], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """
        Returns the Gumbel noise `(B, num_draws, K)` of each row's next draws.

        Args:
            num_draws: Number of draws of each row.
            vocab_size: Number of tokens that the drafter knows. The noise is unknown if the draws have another number.
            steps: As in [`draw`]. Rows that take no token get any noise.
            token_ids (`(K,)`, *optional*): Tokens whose noise is returned; by default all.

        Returns:
            The noise, or `None` if it is unknown.
        """
        noise = self._noise_for(vocab_size)
        return None if noise is None else noise.peek(num_draws, _filled(steps), token_ids)

    def take(self, num_draws: int, vocab_size: int, steps: Sequence[int | None]) -> torch.Tensor | None:
        """
        Returns the exponential variates `(B, num_draws, V)` of the same draws, to choose several tokens at once, or
        `None` if they are unknown or a row would be too far ahead. Call [`settle`] when the tokens are chosen.
        """
        noise, known_steps = self._noise_for(vocab_size), _filled(steps)
        if noise is None or max(known_steps) + num_draws - min(known_steps) > noise.most_ahead:
            return None
        return noise.take(num_draws, known_steps)

    def settle(self, num_steps: int) -> None:
        """Makes the draws of the first `num_steps` tokens."""
        if self._noise is not None:
            self._noise.settle(num_steps)

    def forget(self, steps: Sequence[int | None]) -> None:
        """Drops the noise that all rows have used. `steps` is as in [`draw`], after the draw."""
        if self._noise is not None:
            self._noise.forget(min((step for step in steps if step is not None), default=0))

    def release(self) -> None:
        """Leaves the random generator as plain decoding leaves it."""
        if self._noise is not None:
            self._noise.release()

    def _noise_of(self, probabilities: torch.Tensor, step: int) -> PerRowDraws | None:
        if probabilities.dtype != torch.float32 or not can_preview_multinomial(probabilities.device):
            return None
        batch_size, vocab_size = probabilities.shape
        noise = ReservedNoise if self._reserves_noise else UpcomingNoise
        return PerRowDraws(noise(batch_size, vocab_size, probabilities.device), step)

    def _noise_for(self, vocab_size: int) -> PerRowDraws | None:
        return self._noise if self._drawn_like is not None and self._drawn_like[0][1] == vocab_size else None


def _filled(steps: Sequence[int | None]) -> list[int]:
    """Returns the steps of all rows; a row that takes no token gets the slowest row's."""
    slowest = min(step for step in steps if step is not None)
    return [slowest if step is None else step for step in steps]
