"""Settings whose best value depends on the number of rows of a batch: one value, or a mapping from rows to values."""

from collections.abc import Mapping
from typing import Any

from ..user_errors import UserValueError


def value_for_rows(value: Any, num_rows: int) -> Any:
    """
    Returns a setting's value for a batch: that of the largest key not above `num_rows`, else that of the smallest.

    Args:
        value: One value for all batches, or a mapping from rows to values. Keys are integers, or strings as in JSON.
        num_rows: Rows of the batch, after `num_return_sequences`.

    Raises:
        ValueError: The mapping is empty, or a key is not a number of rows.

    Example:

        >>> value_for_rows({"1": 12, "4": 4, "8": 2}, 5)
        4
    """
    if not isinstance(value, Mapping):
        return value
    by_rows = {_rows(key): item for key, item in value.items()}
    if not by_rows:
        raise UserValueError("a mapping from rows to values must not be empty")
    fitting = [rows for rows in by_rows if rows <= num_rows]
    return by_rows[max(fitting) if fitting else min(by_rows)]


def _rows(key: Any) -> int:
    text = key.strip() if isinstance(key, str) else key
    if isinstance(key, bool) or not str(text).isdecimal() or int(text) < 1:
        raise UserValueError(f"{key!r} is not a number of rows")
    return int(text)
