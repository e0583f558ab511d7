"""The acceptance length, as a function and for `evaluate.load`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np


# `evaluate.load(ACCEPTANCE_LENGTH)`
ACCEPTANCE_LENGTH = str(Path(__file__).with_name("acceptance_length.py"))


@dataclass(frozen=True)
class AcceptanceStatistics:
    """
    How far drafts were accepted. A cycle commits the drafted tokens that the target agrees with and one bonus token.
    All values but the last two are of the cycles in which the drafter drafted, and `None` if there are none.

    Attributes:
        tau_micro: Tokens per drafted cycle.
        tau_macro: Tokens per drafted cycle of each prompt, averaged over the prompts.
        acceptance_per_position: Share of drafted cycles in which at least 1, 2, ... drafted tokens were accepted.
        cycle_shares: Share of drafted cycles that committed exactly 1, 2, ... tokens.
        tokens_per_pass: Tokens per pass of the target after the prefill, with passes that had no drafts.
        paused_share: Share of the passes in which the drafter was paused.
    """

    tau_micro: float | None
    tau_macro: float | None
    acceptance_per_position: list[float] | None
    cycle_shares: list[float] | None
    tokens_per_pass: float
    paused_share: float


def acceptance_statistics(
    accepted_lengths: Sequence[Sequence[int]],
    max_draft_length: int | None = None,
    draft_origins: Sequence[Sequence[str]] | None = None,
) -> AcceptanceStatistics:
    """
    Args:
        accepted_lengths: For each prompt, the tokens that each verification cycle committed, the bonus token included.
        max_draft_length: The longest path that could be drafted. By default the longest accepted one.
        draft_origins: For each prompt, where the drafts of each cycle came from, as the output's `draft_origins` has
            it. By default all cycles count as drafted.

    Raises:
        ValueError: There are no cycles, one committed no token or more than could be drafted, or the origins are of
            other cycles.
    """
    lengths = np.fromiter(chain.from_iterable(accepted_lengths), dtype=np.int64)
    if not lengths.size:
        raise ValueError("There are no cycles: every prompt's list of accepted lengths is empty.")
    if lengths.min() < 1:
        raise ValueError(f"A cycle commits at least its bonus token, got a length of {lengths.min()}.")
    if draft_origins is None:
        draft_origins = [["drafter"] * len(prompt) for prompt in accepted_lengths]
    # A prompt whose text ended before the others of its batch has fewer cycles than the batch.
    if len(draft_origins) != len(accepted_lengths) or any(
        len(origins) < len(prompt) for origins, prompt in zip(draft_origins, accepted_lengths, strict=False)
    ):
        raise ValueError("`draft_origins` must have a list for each prompt, with an entry for each of its cycles.")
    pairs = [list(zip(*prompt, strict=False)) for prompt in zip(accepted_lengths, draft_origins, strict=True)]
    drafted = [[length for length, origin in prompt if origin == "drafter"] for prompt in pairs]
    num_paused = sum(origin == "pause" for prompt in pairs for _, origin in prompt)
    return AcceptanceStatistics(
        **_of_drafted_cycles([prompt for prompt in drafted if prompt], max_draft_length),
        tokens_per_pass=float(lengths.mean()),
        paused_share=num_paused / len(lengths),
    )


def _of_drafted_cycles(drafted: Sequence[Sequence[int]], max_draft_length: int | None) -> dict[str, Any]:
    """Returns the fields of [`AcceptanceStatistics`] that are of drafted cycles alone."""
    names = ("tau_micro", "tau_macro", "acceptance_per_position", "cycle_shares")
    if not drafted:
        return dict.fromkeys(names)
    lengths = np.fromiter(chain.from_iterable(drafted), dtype=np.int64)
    longest = int(lengths.max()) - 1 if max_draft_length is None else max_draft_length
    if lengths.max() > longest + 1:
        raise ValueError(f"A cycle committed {lengths.max()} tokens, more than {longest} drafted ones and a bonus.")
    values = (
        float(lengths.mean()),
        float(np.mean([np.mean(prompt) for prompt in drafted])),
        [float((lengths > position).mean()) for position in range(1, longest + 1)],
        [float((lengths == length).mean()) for length in range(1, longest + 2)],
    )
    return dict(zip(names, values, strict=True))


__all__ = ["ACCEPTANCE_LENGTH", "AcceptanceStatistics", "acceptance_statistics"]
