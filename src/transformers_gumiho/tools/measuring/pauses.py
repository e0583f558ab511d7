"""Why the drafter paused, in words."""


def why_paused(num_paused: int, num_passes: int, break_even: float | None) -> str | None:
    """
    Returns a sentence about the passes in which the drafter was paused, `None` if there are none. `break_even` is what
    a drafted pass must commit.
    """
    if not num_paused:
        return None
    share = f"The drafter was paused in {num_paused} of {num_passes} passes"
    if break_even is None:
        return f"{share}."
    return (
        f"{share}: drafting costs {break_even - 1:.1f} steps of plain decoding here, so a pass must commit "
        f"{break_even:.1f} tokens. --break_even 1 never pauses."
    )
