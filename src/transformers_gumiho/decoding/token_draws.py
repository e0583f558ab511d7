"""Drawing the target's tokens where they are sampled, as plain decoding draws them."""

from collections.abc import Sequence

import torch

from ..uploads import upload
from .sampling_noise import DRAWING, PerRowDraws, ReservedNoise, UpcomingNoise, can_preview_multinomial


class TokenDraws:
    """
    The draws of a generation.

    Args:
        reserves_noise: Whether noise that was seen is drawn with, whoever else draws meanwhile ([`ReservedNoise`]).
            Rows that may be at different steps need it, and several tokens that are drawn at once.
    """

    def __init__(self, reserves_noise: bool):
        self._reserves_noise = reserves_noise
        self._drawn_like: tuple[torch.Size, torch.device, torch.dtype] | None = None  # the newest tokens
        self._noise: PerRowDraws | None = None  # where it can be previewed

    @property
    def most_ahead(self) -> float:
        """By how many tokens a row may be ahead of the slowest one."""
        return float("inf") if self._noise is None else self._noise.most_ahead

    def draw(self, scores: torch.Tensor, steps: Sequence[int | None]) -> torch.Tensor:
        """
        Draws a token `(B, 1)` for every row.

        Args:
            scores (`(B, V)`): Processed logits.
            steps: How many tokens each row has drawn before; `None` for rows that take none, which may have no scores.
        """
        taking = [step for step in steps if step is not None]
        if len(taking) < len(steps):
            idle = upload([[step is None] for step in steps], scores.device)
            scores = scores.masked_fill(idle, 0.0)
        probabilities = scores.softmax(dim=-1)
        drawn_like = probabilities.shape, probabilities.device, probabilities.dtype
        if drawn_like != self._drawn_like:
            # A processor may have made the scores wider or narrower, or of another precision.
            self._drawn_like, self._noise = drawn_like, self._noise_of(probabilities, max(taking))
        if self._noise is None:
            with DRAWING:
                return torch.multinomial(probabilities, num_samples=1)
        return self._noise.draw(probabilities, [max(taking) if step is None else step for step in steps])

    def peek(
        self, num_draws: int, vocab_size: int, steps: Sequence[int | None], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """
        Returns the noise `(B, num_draws, K)` that the next tokens of each row will be drawn with.

        Args:
            num_draws: Tokens of each row.
            vocab_size: Tokens that are drafted from. Where those that were drawn from are more or fewer, nobody can
                tell.
            steps: As in [`draw`]. The noise of rows that take no token is any.
            token_ids (`(K,)`, *optional*): The tokens that are asked for (default: all).

        Returns:
            `None` where it is not known.
        """
        noise = self._noise_for(vocab_size)
        return None if noise is None else noise.peek(num_draws, _filled(steps), token_ids)

    def take(self, num_draws: int, vocab_size: int, steps: Sequence[int | None]) -> torch.Tensor | None:
        """
        Returns the exponential variates `(B, num_draws, V)` of the same draws, to draw with at once; `None` where they
        are not known, or one row would go too far ahead. Call [`settle`] when the tokens are chosen.
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
        """Forgets the noise that no row will be drawn with any more; `steps` as in [`draw`], after it."""
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
    """Returns the steps of all rows, those of the slowest one for rows that take no token."""
    slowest = min(step for step in steps if step is not None)
    return [slowest if step is None else step for step in steps]
