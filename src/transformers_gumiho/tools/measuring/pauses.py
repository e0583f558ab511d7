"""Why the drafter paused, in words."""

from collections.abc import Sequence

from ...generation.drafting.candidate_generator import DraftOrigin


def why_paused(origins: Sequence[DraftOrigin]) -> str | None:
    """Returns a sentence about the passes in which the drafter was paused, `None` if there are none."""
    paused = [origin for origin in origins if origin.source == "pause"]
    if not paused:
        return None
    share = f"The drafter was paused in {len(paused)} of {len(origins)} passes"
    break_even = paused[-1].break_even
    if break_even is None:
        return f"{share}."
    return (
        f"{share}: to draft costs {break_even - 1:.1f} of a step of plain decoding here, so a pass must commit "
        f"{break_even:.1f} tokens. --break_even 1 never pauses."
    )
