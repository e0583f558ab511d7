"""What is kept of every generated token: scores, logits and hidden states, as plain `generate()` returns them."""

from collections.abc import Sequence
from typing import Any

import torch


class StepRecord:
    """
    Values of every generated token (scores, logits), recorded row by row because rows advance by different lengths.

    Args:
        batch_size (`int`): Number of rows.
        enabled (`bool`): Without it nothing is recorded, and the record reads as `None`.
    """

    def __init__(self, batch_size: int, enabled: bool):
        self.enabled = enabled
        self._rows: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]
        self._complete: list[torch.Tensor] = []  # the steps that every row has, stacked

    def add(self, values: torch.Tensor, counts: Sequence[int]) -> None:
        """Records the first `counts[b]` of `values` `(B, n, ...)` for each row."""
        if self.enabled:
            for row, (steps, count) in enumerate(zip(self._rows, counts, strict=True)):
                steps.extend(values[row, :count].unbind())

    def trim(self, counts: Sequence[int]) -> None:
        """Keeps the first `counts[b]` values of each row."""
        if self.enabled:
            for steps, count in zip(self._rows, counts, strict=True):
                del steps[count:]
            del self._complete[min(counts) :]

    def until(self, num_steps: int) -> tuple[torch.Tensor, ...] | None:
        """Returns one tensor `(B, ...)` for each of the first steps; zeros in rows that ended before."""
        if not self.enabled:
            return None
        if num_steps == 0:
            return ()
        for step in range(len(self._complete), min(num_steps, *(len(steps) for steps in self._rows))):
            self._complete.append(torch.stack([steps[step] for steps in self._rows]))
        zeros = torch.zeros_like(next(steps[0] for steps in self._rows if steps))
        ragged = [
            torch.stack([steps[step] if step < len(steps) else zeros for steps in self._rows])
            for step in range(len(self._complete), num_steps)
        ]
        return (*self._complete[:num_steps], *ragged)


class HiddenStateRecord:
    """The hidden states of all layers for every generated token, as plain `generate()` returns them."""

    def __init__(self, batch_size: int, enabled: bool):
        self.enabled = enabled
        self._batch_size = batch_size
        self._prompt: tuple[torch.Tensor, ...] | None = None
        self._layers: list[StepRecord] = []

    def add_prompt(self, hidden_states: Any) -> None:
        """Records the states of the prompt, which belong to the first token."""
        if self.enabled:
            self._prompt = tuple(hidden_states)
            self._layers = [StepRecord(self._batch_size, True) for _ in self._prompt]

    def add(self, hidden_states: Any, nodes: torch.Tensor, counts: Sequence[int]) -> None:
        """Records the states `(B, N + 1, H)` of each layer at `nodes` `(B, L)`, the first `counts[b]` of each row."""
        if self.enabled:
            for record, states in zip(self._layers, hidden_states, strict=True):
                index = nodes.to(states.device)[:, :, None].expand(-1, -1, states.shape[2])
                record.add(states.gather(1, index), counts)

    def until(self, num_steps: int) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        """Returns for each of the first steps the states of all layers, `(B, 1, H)` after the first step."""
        if self._prompt is None:
            return None
        later = num_steps - 1
        layers = [record.until(later) or () for record in self._layers]
        return (self._prompt, *(tuple(layer[step][:, None] for layer in layers) for step in range(later)))
