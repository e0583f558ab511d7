"""Rows in batches within a budget of padded tokens."""

from collections.abc import Iterable, Sequence


def within_budget(rows: Iterable[int], lengths: Sequence[int], num_tokens: int) -> list[list[int]]:
    """
    Returns rows in batches of at most `num_tokens` tokens, padding included: the longest first, equally long ones in
    their order. A longer row is alone.
    """
    batches: list[list[int]] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= num_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
