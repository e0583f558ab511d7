"""When the drafter pauses: while its drafts gain less than they cost."""

from dataclasses import dataclass
from typing import Literal


# Lost tokens per row above which the drafter pauses, and the most that earlier gains make up for.
MAX_LOST, MAX_GAINED = 2.0, 4.0
# Cycles of a pause: the first one, and those after it until the losses are regained.
FIRST_PAUSE, LATER_PAUSE = 8, 64


@dataclass(frozen=True)
class DraftOrigin:
    """
    Where the tokens of a draft tree come from.

    Attributes:
        source: "drafter"; "context", where the text repeats itself and needs no drafter; or "pause", where the drafter
            is paused and the tree has prompt-lookup drafts or the root alone.
        num_left: Further cycles of the pause.
    """

    source: Literal["drafter", "context", "pause"]
    num_left: int = 0


class DraftingPause:
    """
    Counts what drafting loses and pauses it. No clock is read, so a text is the same in every run.

    Args:
        break_even: Tokens per row that a drafted cycle must commit to be as fast as plain decoding.

    Attributes:
        num_left: Cycles of the present pause that are left.
    """

    def __init__(self, break_even: float):
        self._break_even = break_even
        self._lost = 0.0
        self._next_pause = FIRST_PAUSE
        self.num_left = 0

    def observe(self, tokens: float, right: float = 0.0) -> None:
        """
        Counts a cycle that drafted.

        Args:
            tokens: Tokens that it committed, as the mean over the open rows.
            right: Tokens that prompt lookup alone would have drafted correctly, as the same mean.
        """
        self._lost = max(self._lost + self._break_even + right - tokens, -MAX_GAINED)
        if self._lost <= 0:
            self._next_pause = FIRST_PAUSE
        if self._lost > MAX_LOST:
            # One more losing cycle after the pause begins the next one.
            self._lost = MAX_LOST
            self.num_left, self._next_pause = self._next_pause, LATER_PAUSE

    def take_cycle(self) -> bool:
        """Returns whether the next cycle is one of a pause, and counts it."""
        is_paused = self.num_left > 0
        self.num_left -= is_paused
        return is_paused
