"""What cycles committed, as the drafter reads it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..uploads import upload


@dataclass(frozen=True)
class CommittedTokens:
    """
    Newly committed tokens of each row, aligned left, with the states that they were chosen from.

    Attributes:
        tokens (`(B, n)`): The tokens.
        drafter_input (`(B, n, H_in)`): For each, what the drafter reads of the target's state it was chosen from.
        position_ids (`(B, n)`): For each, the position of that state.
        accepted_lengths: How many of the `n` are real in each row.
        attention_mask (`(B, n)`, *optional*): For the prompt, 0 where a state belongs to padding.
    """

    tokens: torch.Tensor
    drafter_input: torch.Tensor
    position_ids: torch.Tensor
    accepted_lengths: list[int]
    attention_mask: torch.Tensor | None = None

    def to(self, device: torch.device) -> "CommittedTokens":
        """Returns the tokens, states, positions and mask on `device`."""
        return CommittedTokens(
            self.tokens.to(device),
            self.drafter_input.to(device),
            self.position_ids.to(device),
            self.accepted_lengths,
            self.attention_mask.to(device) if self.attention_mask is not None else None,
        )

    def narrow(self) -> "CommittedTokens":
        """Returns the tokens without columns that are real in no row."""
        width = max(self.accepted_lengths)
        return CommittedTokens(
            self.tokens[:, :width],
            self.drafter_input[:, :width],
            self.position_ids[:, :width],
            self.accepted_lengths,
            self.attention_mask[:, :width] if self.attention_mask is not None else None,
        )

    @classmethod
    def join(cls, parts: Sequence["CommittedTokens"]) -> "CommittedTokens":
        """Returns what several cycles in a row committed, none of them the prompt, as if it had been one."""
        if len(parts) == 1:
            return parts[0]
        places: list[list[int]] = [[] for _ in parts[0].accepted_lengths]
        start = 0
        for part in parts:
            for row, length in zip(places, part.accepted_lengths, strict=True):
                row.extend(range(start, start + length))
            start += part.tokens.shape[1]
        together = cls(
            torch.cat([part.tokens for part in parts], dim=1),
            torch.cat([part.drafter_input for part in parts], dim=1),
            torch.cat([part.position_ids for part in parts], dim=1),
            [],
        )
        return together._pick(places, max(map(len, places)))

    def split(self, width: int) -> list["CommittedTokens"]:
        """
        Returns the same tokens in parts of `width`, the oldest first. The last part holds the newest token of each
        row that has one.
        """
        if self.tokens.shape[1] == width:
            return [self]
        parts: list[CommittedTokens] = []
        ends = list(self.accepted_lengths)
        while not parts or max(ends) > 0:
            starts = [max(end - width, 0) for end in ends]
            places = [list(range(start, end)) for start, end in zip(starts, ends, strict=True)]
            parts.append(self._pick(places, width))
            ends = starts
        return parts[::-1]

    def _pick(self, places: Sequence[list[int]], width: int) -> "CommittedTokens":
        """Returns the tokens at these places of each row, aligned left, then any tokens up to `width`."""
        rows = [[*row, *[0] * (width - len(row))] for row in places]
        index = upload(rows, self.tokens.device)
        states = index.to(self.drafter_input.device)[:, :, None].expand(-1, -1, self.drafter_input.shape[2])
        return CommittedTokens(
            self.tokens.gather(1, index),
            self.drafter_input.gather(1, states),
            self.position_ids.gather(1, index.to(self.position_ids.device)),
            [len(row) for row in places],
        )
