"""Committed tokens, with the target's hidden states that the drafter reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..uploads import upload


@dataclass(frozen=True)
class CommittedTokens:
    """
    The newly committed tokens of each row, aligned left, and the target's hidden states that predicted them.

    Attributes:
        tokens (`(B, n)`): The token ids.
        drafter_input (`(B, n, k * H)`): The target's states of the layers that the drafter reads, one state per token.
        position_ids (`(B, n)`): The positions of these states.
        accepted_lengths: Number of committed tokens in each row. Entries after them have no meaning.
        attention_mask (`(B, n)`, *optional*): For the prompt: 0 if the state belongs to padding.
    """

    tokens: torch.Tensor
    drafter_input: torch.Tensor
    position_ids: torch.Tensor
    accepted_lengths: list[int]
    attention_mask: torch.Tensor | None = None

    def to(self, device: torch.device) -> "CommittedTokens":
        """Returns the same with all tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device))

    def narrow(self) -> "CommittedTokens":
        """Returns the same without columns that no row uses."""
        width = max(self.accepted_lengths)
        return self._map(lambda tensor: tensor[:, :width])

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "CommittedTokens":
        return replace(
            self,
            tokens=function(self.tokens),
            drafter_input=function(self.drafter_input),
            position_ids=function(self.position_ids),
            attention_mask=None if self.attention_mask is None else function(self.attention_mask),
        )

    @classmethod
    def join(cls, parts: Sequence["CommittedTokens"]) -> "CommittedTokens":
        """Returns the tokens of consecutive cycles as if one cycle had committed them. The prompt is not joined."""
        if len(parts) == 1:
            return parts[0]
        columns: list[list[int]] = [[] for _ in parts[0].accepted_lengths]
        start = 0
        for part in parts:
            for row, length in zip(columns, part.accepted_lengths, strict=True):
                row.extend(range(start, start + length))
            start += part.tokens.shape[1]
        joined = cls(
            torch.cat([part.tokens for part in parts], dim=1),
            torch.cat([part.drafter_input for part in parts], dim=1),
            torch.cat([part.position_ids for part in parts], dim=1),
            [],
        )
        return joined._pick(columns, max(map(len, columns)))

    def split(self, width: int) -> list["CommittedTokens"]:
        """Returns the same tokens in parts of `width`, the oldest first. The last part has each row's newest token."""
        if self.tokens.shape[1] == width:
            return [self]
        parts: list[CommittedTokens] = []
        ends = list(self.accepted_lengths)
        while not parts or max(ends) > 0:
            starts = [max(end - width, 0) for end in ends]
            parts.append(self._pick([list(range(*bounds)) for bounds in zip(starts, ends, strict=True)], width))
            ends = starts
        return parts[::-1]

    def _pick(self, columns: Sequence[list[int]], width: int) -> "CommittedTokens":
        """Returns the tokens in these columns of each row, aligned left, padded with any tokens to `width`."""
        index = upload([[*row, *[0] * (width - len(row))] for row in columns], self.tokens.device)
        states = index.to(self.drafter_input.device)[:, :, None].expand(-1, -1, self.drafter_input.shape[2])
        return CommittedTokens(
            self.tokens.gather(1, index),
            self.drafter_input.gather(1, states),
            self.position_ids.gather(1, index.to(self.position_ids.device)),
            [len(row) for row in columns],
        )
