"""The acceptance length, as a function and for `evaluate.load`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np


# `evaluate.load(ACCEPTANCE_LENGTH)`
ACCEPTANCE_LENGTH = str(Path(__file__).with_name("acceptance_length.py"))


@dataclass(frozen=True)
class AcceptanceStatistics:
    """
    How far drafts were accepted. A cycle commits the drafted tokens that the target agrees with and one bonus token.

    Attributes:
        tau_micro: Tokens per cycle, over all cycles.
        tau_macro: Tokens per cycle of each prompt, averaged over the prompts.
        acceptance_per_position: Share of cycles in which at least 1, 2, ... drafted tokens were accepted.
        cycle_shares: Share of cycles that committed exactly 1, 2, ... tokens.
    """

    tau_micro: float
    tau_macro: float
    acceptance_per_position: list[float]
    cycle_shares: list[float]


def acceptance_statistics(
    accepted_lengths: Sequence[Sequence[int]], max_draft_length: int | None = None
) -> AcceptanceStatistics:
    """
    Args:
        accepted_lengths: For each prompt, the tokens that each verification cycle committed, the bonus token included.
        max_draft_length: The longest path that could be drafted. By default the longest accepted one.

    Raises:
        ValueError: There are no cycles, or one committed no token or more than could be drafted.
    """
    lengths = np.fromiter(chain.from_iterable(accepted_lengths), dtype=np.int64)
    if not lengths.size:
        raise ValueError("There are no cycles: every prompt's list of accepted lengths is empty.")
    if lengths.min() < 1:
        raise ValueError(f"A cycle commits at least its bonus token, got a length of {lengths.min()}.")
    longest = int(lengths.max()) - 1 if max_draft_length is None else max_draft_length
    if lengths.max() > longest + 1:
        raise ValueError(f"A cycle committed {lengths.max()} tokens, more than {longest} drafted ones and a bonus.")
    return AcceptanceStatistics(
        tau_micro=float(lengths.mean()),
        tau_macro=float(np.mean([np.mean(prompt) for prompt in accepted_lengths if len(prompt)])),
        acceptance_per_position=[float((lengths > position).mean()) for position in range(1, longest + 1)],
        cycle_shares=[float((lengths == length).mean()) for length in range(1, longest + 2)],
    )


__all__ = ["ACCEPTANCE_LENGTH", "AcceptanceStatistics", "acceptance_statistics"]
