"""The loss terms of the steps since they were logged last."""

from collections import Counter

import torch


class TermAverages:
    """Sums of the loss terms, and for each the number of steps it was computed in."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.steps: Counter[str] = Counter()
        self._seen: set[str] = set()

    def next_step(self) -> None:
        self._seen = set()

    def add(self, terms: dict[str, torch.Tensor]) -> None:
        """Adds a batch's share of the terms of a step."""
        for name, term in terms.items():
            self.sums[name] = self.sums.get(name, 0) + term
            self.steps[name] += name not in self._seen
            self._seen.add(name)
