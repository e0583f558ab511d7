"""What a cycle committed, as the drafter reads it."""

from dataclasses import dataclass

import torch


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
