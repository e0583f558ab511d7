"""Why a cycle verified as many drafted tokens as it did, in a line."""

from ..drafting.tree_size import ContextRun, DraftingPause, SizeReason


# What probabilities are where cycles have costs, at the end of what they are elsewhere.
OTHERWISE = " (or as often as such paths were accepted, and for tokens from the context an estimate)"
# Sizes beside the chosen one whose speeds are told.
_NUM_ALTERNATIVES = 4


def describe_size(reason: SizeReason) -> str:
    """Returns one line on the size of a tree: what was expected of it and of others, or why the drafter rests."""
    if isinstance(reason, ContextRun):
        speed = 1e3 * (1 + reason.expected) / reason.cycle_ms
        return (
            f"{reason.size} tokens from the context alone, a run, as all before were right: {reason.expected:.2f} "
            f"accepted tokens expected in {reason.cycle_ms:.1f} ms, {speed:.0f} tokens/s"
        )
    if isinstance(reason, DraftingPause):
        drafted = f"{reason.size} tokens from the context alone" if reason.size else "nothing drafted"
        return (
            f"{drafted}: the newest drafts gave {reason.drafted_speed:.0f} tokens/s, without the drafter "
            f"{reason.undrafted_speed:.0f}; tried again {_after(reason.num_left)}"
        )
    place, speeds = reason.place, reason.tokens_per_second
    others = [other for other in range(len(speeds)) if other != place]
    # The best of the others, in the order of their sizes.
    shown = sorted(sorted(others, key=lambda other: -speeds[other])[:_NUM_ALTERNATIVES])
    alternatives = "".join(f"{reason.sizes[other]}: {speeds[other]:.0f}, " for other in shown)
    return (
        f"size {reason.size} of {reason.sizes[-1]}: {reason.expected[place]:.2f} accepted tokens expected (x "
        f"{reason.correction:.2f}, as observed) in {reason.cycle_ms[place]:.1f} ms, {speeds[place]:.0f} tokens/s "
        f"({alternatives}plain: {1e3 / reason.plain_ms:.0f})"
    )


def _after(num_cycles: int) -> str:
    if num_cycles == 0:
        return "in the next cycle"
    return f"after {num_cycles} more cycle{'s' if num_cycles > 1 else ''}"
