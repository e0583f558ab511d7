"""Drawing the target's tokens where they are sampled, as plain decoding draws them."""

from collections.abc import Sequence

import torch

from .sampling_noise import NoiseOfRows, UpcomingNoise


class TokenDraws:
    """
    The draws of a generation.

    Args:
        rows_part: Whether rows may be at different steps.
    """

    def __init__(self, rows_part: bool):
        self._rows_part = rows_part
        self._upcoming: UpcomingNoise | None = None  # of draws like those of the newest tokens
        self._of_rows: NoiseOfRows | None = None  # where tokens are drawn with what was seen

    @property
    def most_ahead(self) -> float:
        """By how many tokens a row may be ahead of the slowest one."""
        return float("inf") if self._of_rows is None else self._of_rows.most_ahead

    def draw(self, scores: torch.Tensor, steps: Sequence[int | None]) -> torch.Tensor:
        """
        Draws a token `(B, 1)` for every row.

        Args:
            scores (`(B, V)`): Processed logits.
            steps: How many tokens each row has drawn before; `None` for rows that take none, which may have no scores.
        """
        taking = [step for step in steps if step is not None]
        if len(taking) < len(steps):
            idle = torch.tensor([[step is None] for step in steps], device=scores.device)
            scores = scores.masked_fill(idle, 0.0)
        probabilities = scores.softmax(dim=-1)
        if self._upcoming is None or (self._upcoming.shape, self._upcoming.device) != (scores.shape, scores.device):
            self._upcoming = UpcomingNoise(scores.shape[0], scores.shape[1], scores.device)
            # Where random numbers cost much, those that were seen are not made again.
            is_used = self._upcoming.is_told and (self._rows_part or scores.device.type == "cpu")
            self._of_rows = NoiseOfRows(self._upcoming, max(taking)) if is_used else None
        if self._of_rows is None:
            return torch.multinomial(probabilities, num_samples=1)
        return self._of_rows.draw(probabilities, [max(taking) if step is None else step for step in steps])

    def peek(self, num_draws: int, vocab_size: int, steps: Sequence[int | None]) -> torch.Tensor | None:
        """
        Returns the noise `(B, num_draws, V)` that the next tokens of each row will be drawn with.

        Args:
            num_draws: Tokens of each row.
            vocab_size: Tokens that are drafted from. A processor may have made the scores wider or narrower; then
                nobody can tell.
            steps: As in [`draw`]. The noise of rows that take no token is any.

        Returns:
            `None` where it is not known.
        """
        if self._upcoming is None or self._upcoming.shape[1] != vocab_size:
            return None
        if self._of_rows is None:
            # Rows that part without being told theirs would know what depends on how far they get.
            return None if self._rows_part else self._upcoming.peek(num_draws)
        slowest = min(step for step in steps if step is not None)
        return self._of_rows.peek(num_draws, [slowest if step is None else step for step in steps])

    def forget(self, steps: Sequence[int | None]) -> None:
        """Forgets the noise that no row will be drawn with any more; `steps` as in [`draw`], after it."""
        if self._of_rows is not None:
            self._of_rows.forget(min((step for step in steps if step is not None), default=0))
