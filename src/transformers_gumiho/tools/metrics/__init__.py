"""The acceptance length, as a function and for `evaluate.load`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ...commands import UserValueError


# `evaluate.load(ACCEPTANCE_LENGTH)`
ACCEPTANCE_LENGTH = str(Path(__file__).with_name("acceptance_length.py"))


@dataclass(frozen=True)
class AcceptanceStatistics:
    """
    How far drafts were accepted. A cycle commits the drafted tokens that the target agrees with and one bonus token.

    Attributes:
        tau_micro: Tokens per cycle in which the drafter drafted; `None` without such a cycle.
        tau_macro: The same of each prompt, averaged over the prompts.
        acceptance_per_position: Share of drafted cycles in which at least 1, 2, ... drafted tokens were accepted.
        tokens_per_pass: Tokens per pass after the prefill, also without drafts; `None` without cycles.
        paused_share: Share of the passes in which the drafter was paused.
    """

    tau_micro: float | None
    tau_macro: float | None
    acceptance_per_position: list[float]
    tokens_per_pass: float | None
    paused_share: float


def acceptance_statistics(
    accepted_lengths: Sequence[Sequence[int]], draft_origins: Sequence[Sequence[str]] | None = None
) -> AcceptanceStatistics:
    """
    Args:
        accepted_lengths: For each prompt, the tokens that each cycle committed, bonus token included.
        draft_origins: For each prompt, the output's `draft_origins`. By default all cycles count as drafted.

    Raises:
        ValueError: There are no cycles, one committed no token, or the origins are of other cycles.
    """
    lengths = [length for prompt in accepted_lengths for length in prompt]
    if not lengths:
        raise UserValueError("There are no cycles: every prompt's list of accepted lengths is empty.")
    if min(lengths) < 1:
        raise UserValueError(f"A cycle commits at least its bonus token, got a length of {min(lengths)}.")
    if draft_origins is None:
        draft_origins = [["drafter"] * len(prompt) for prompt in accepted_lengths]
    # A prompt whose text ended before the others of its batch has fewer cycles than the batch.
    if len(draft_origins) != len(accepted_lengths) or any(
        len(origins) < len(prompt) for origins, prompt in zip(draft_origins, accepted_lengths, strict=False)
    ):
        raise UserValueError("`draft_origins` must have a list for each prompt, with an entry for each of its cycles.")
    pairs = [list(zip(*prompt, strict=False)) for prompt in zip(accepted_lengths, draft_origins, strict=True)]
    by_prompt = [[length for length, origin in prompt if origin == "drafter"] for prompt in pairs]
    by_prompt = [drafted for drafted in by_prompt if drafted]
    drafted = [length for prompt in by_prompt for length in prompt]
    return AcceptanceStatistics(
        tau_micro=fmean(drafted) if drafted else None,
        tau_macro=fmean(map(fmean, by_prompt)) if drafted else None,
        acceptance_per_position=[
            sum(length > position for length in drafted) / len(drafted) for position in range(1, max([1, *drafted]))
        ],
        tokens_per_pass=fmean(lengths),
        paused_share=sum(origin == "pause" for prompt in pairs for _, origin in prompt) / len(lengths),
    )


__all__ = ["ACCEPTANCE_LENGTH", "AcceptanceStatistics", "acceptance_statistics"]
