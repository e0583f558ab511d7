"""Pauses of the drafter, while its drafts gain less than they cost."""

from dataclasses import dataclass
from typing import Literal


# The drafter pauses above this many lost tokens per row. Earlier gains offset at most MAX_GAINED of them.
MAX_LOST, MAX_GAINED = 2.0, 4.0
# Cycles of the first pause, and of later ones until the losses are regained.
FIRST_PAUSE, LATER_PAUSE = 8, 64


@dataclass(frozen=True)
class DraftOrigin:
    """
    Where the tokens of a draft tree come from.

    Attributes:
        source: "drafter"; "context" for a run of prompt-lookup drafts; "pause" if the drafter is paused; or "end" if
            one token is missing. In a pause the tree has prompt-lookup drafts, or the root alone. At the end it is the
            root alone.
        num_left: Remaining cycles of the pause after this one.
    """

    source: Literal["drafter", "context", "pause", "end"]
    num_left: int = 0


class DraftingPause:
    """
    Counts what drafting loses and pauses it. No clock is read, so a text is the same in every run.

    Args:
        break_even: Tokens per row that a drafted cycle must commit to be as fast as plain decoding.

    Attributes:
        num_left: Remaining cycles of the current pause.
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
        """Returns whether the drafter is paused in the next cycle, and counts that cycle."""
        is_paused = self.num_left > 0
        self.num_left -= is_paused
        return is_paused
