"""Records of every generated token: scores, logits and hidden states, as plain `generate()` returns them."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from ..tree.draft_tree import DraftTree
from ..tree.walk import AcceptedPath, pick


class StepRecord:
    """
    Values of every generated token (scores or logits), recorded per row because rows advance by different lengths.

    Args:
        batch_size (`int`): Number of rows.
        enabled (`bool`): If `False`, nothing is recorded, and the record reads as `None`.
    """

    def __init__(self, batch_size: int, enabled: bool):
        self.enabled = enabled
        self._rows: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]
        self._complete: list[torch.Tensor] = []  # the steps that every row has, stacked

    def add(self, values: torch.Tensor, accepted_lengths: Sequence[int]) -> None:
        """Records the first `accepted_lengths[b]` of `values` `(B, n, ...)` for each row."""
        if self.enabled:
            for row, (steps, length) in enumerate(zip(self._rows, accepted_lengths, strict=True)):
                steps.extend(values[row, :length].unbind())

    def trim(self, lengths: Sequence[int]) -> None:
        """Keeps the first `lengths[b]` values of each row."""
        if self.enabled:
            for steps, length in zip(self._rows, lengths, strict=True):
                del steps[length:]
            del self._complete[min(lengths) :]

    def until(self, num_steps: int) -> tuple[torch.Tensor, ...] | None:
        """Returns a tensor `(B, ...)` for each of the first steps, with zeros in rows that have ended."""
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

    def add(self, hidden_states: Any, path: AcceptedPath) -> None:
        """Records the states `(B, N + 1, H)` of each layer along the path."""
        if self.enabled:
            for record, states in zip(self._layers, hidden_states, strict=True):
                record.add(pick(states, path.nodes), path.accepted_lengths)

    def until(self, num_steps: int) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        """Returns for each of the first steps the states of all layers, `(B, 1, H)` after the first step."""
        if self._prompt is None:
            return None
        later = num_steps - 1
        layers = [record.until(later) or () for record in self._layers]
        return (self._prompt, *(tuple(layer[step][:, None] for layer in layers) for step in range(later)))


class CycleRecords:
    """
    The records of all cycles.

    Attributes:
        hidden_states: Hidden states of all layers, if they are to be returned.
        tree_sizes: Number of draft tokens that each cycle verified.
    """

    def __init__(self, batch_size: int, generation_config: GenerationConfig):
        returns_states = generation_config.return_dict_in_generate and generation_config.output_hidden_states
        self.hidden_states = HiddenStateRecord(batch_size, bool(returns_states))
        self.tree_sizes: list[int] = []
        self._accepted_lengths: list[list[int]] = [[] for _ in range(batch_size)]

    def add(self, tree: DraftTree, path: AcceptedPath, hidden_states: Any) -> None:
        """Records a cycle, with the states `(B, N + 1, H)` of each layer."""
        self.hidden_states.add(hidden_states, path)
        self.tree_sizes.append(tree.tokens.shape[1] - 1)
        for row, length in zip(self._accepted_lengths, path.accepted_lengths, strict=True):
            row.extend([length] if length else [])

    def accepted_lengths(self, num_removed: Sequence[int]) -> list[list[int]]:
        """Returns the tokens that the cycles committed in each row, without the last `num_removed[b]` tokens."""
        return [_without_last(*row) for row in zip(self._accepted_lengths, num_removed, strict=True)]


def _without_last(accepted_lengths: list[int], num_tokens: int) -> list[int]:
    ends = list(itertools.accumulate(accepted_lengths))
    total = (ends[-1] if ends else 0) - num_tokens
    pairs = zip(accepted_lengths, ends, strict=True)
    return [length - max(end - total, 0) for length, end in pairs if end - length < total]
