"""What cycles cost on a machine: the decoding setting `cycle_costs`, a small table that goes into a JSON file."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from .acceptance_curves import AcceptanceCurve, AcceptanceCurves


Numbers = tuple[float, ...]


@dataclass(frozen=True)
class BatchCosts:
    """
    What cycles with a number of rows cost.

    Attributes:
        tree_sizes: Drafted tokens of trees, increasing.
        verify_ms: For each of them, milliseconds of the target's pass.
        draft_ms: For each of them, milliseconds of all else in a cycle that drafts so many tokens.
        plain_ms: Milliseconds of a step of plain decoding.
    """

    tree_sizes: tuple[int, ...]
    verify_ms: Numbers
    draft_ms: Numbers
    plain_ms: float

    def cycle_ms(self, tree_sizes: Sequence[int] | int, num_drafted: int | None = None) -> np.ndarray:
        """
        Returns the milliseconds of cycles that verify so many drafted tokens.

        Args:
            tree_sizes: The tokens that are verified.
            num_drafted: Those that were drafted for it; by default as many.
        """
        drafted = tree_sizes if num_drafted is None else num_drafted
        return np.asarray(self._of_sizes(self.draft_ms, drafted) + self._of_sizes(self.verify_ms, tree_sizes))

    def undrafted_ms(self, tree_sizes: Sequence[int] | int) -> np.ndarray:
        """
        Returns the milliseconds of cycles without the drafter, that verify so many tokens which the context drafts: a
        step of plain decoding, and what a pass over more tokens costs more.
        """
        more = self._of_sizes(self.verify_ms, tree_sizes) - self.verify_ms[0]
        return np.asarray(self.plain_ms + np.maximum(more, 0.0))

    def _of_sizes(self, measured: Numbers, tree_sizes: Sequence[int] | int) -> np.ndarray:
        sizes, largest = np.asarray(tree_sizes), self.tree_sizes[-1]
        # Beyond what was measured, in proportion to what the largest tree costs more than the root.
        slope = max(measured[-1] - measured[0], 0.0) / max(largest, 1)
        return np.interp(sizes, self.tree_sizes, measured) + slope * np.maximum(sizes - largest, 0)


@dataclass(frozen=True)
class CycleCostTable:
    """
    What cycles were measured to cost on a machine, by `gumiho tune`.

    Attributes:
        machine: Its name.
        dtype: That of the target.
        batch_sizes: Rows of the batches that were timed, increasing.
        tree_sizes: Drafted tokens of the trees that were timed, increasing, 0 first.
        verify_ms: For each batch size and each tree size, milliseconds of the target's pass over the tree.
        draft_ms: For each batch size and each tree size, milliseconds of all else in a cycle that drafts so many
            tokens.
        plain_ms: For each batch size, milliseconds of a step of plain decoding.
        greedy: How often drafted tokens were accepted, at each depth from 1 on; `None` takes the drafter's own
            probabilities.
        sampling: The same where tokens are sampled.
        sampled_draft_ms: `draft_ms` where tokens are sampled; `None` takes the same.
        sampled_plain_ms: `plain_ms` where tokens are sampled; `None` takes the same.
    """

    machine: str
    dtype: str
    batch_sizes: tuple[int, ...]
    tree_sizes: tuple[int, ...]
    verify_ms: tuple[Numbers, ...]
    draft_ms: tuple[Numbers, ...]
    plain_ms: Numbers
    greedy: tuple[AcceptanceCurve, ...] | None = None
    sampling: tuple[AcceptanceCurve, ...] | None = None
    sampled_draft_ms: tuple[Numbers, ...] | None = None
    sampled_plain_ms: Numbers | None = None

    @classmethod
    def parse(cls, value: Any) -> "CycleCostTable":
        """
        Reads a table from dictionaries, lists and numbers.

        Raises:
            ValueError: Something is missing or malformed; the message is the end of a sentence about the table.
        """
        _check_keys(value, _REQUIRED, _OPTIONAL)
        for name in ("machine", "dtype"):
            if not isinstance(value[name], str):
                raise ValueError(f"its `{name}` must be a text, got {value[name]!r}")
        batch_sizes = _increasing(value, "batch_sizes", 1)
        tree_sizes = _increasing(value, "tree_sizes", 0)
        if tree_sizes[0] != 0:
            raise ValueError(f"its `tree_sizes` must begin with 0, the root alone, got {list(tree_sizes)}")
        num_batches, num_trees = len(batch_sizes), len(tree_sizes)
        sampled_draft, sampled_plain = value.get("sampled_draft_ms"), value.get("sampled_plain_ms")
        return cls(
            machine=value["machine"],
            dtype=value["dtype"],
            batch_sizes=batch_sizes,
            tree_sizes=tree_sizes,
            verify_ms=_of_batches(value["verify_ms"], "verify_ms", num_batches, num_trees),
            draft_ms=_of_batches(_for_all_sizes(value["draft_ms"], num_trees), "draft_ms", num_batches, num_trees),
            plain_ms=_positive(value["plain_ms"], "plain_ms", num_batches, "batch sizes"),
            greedy=_parse_curves(value.get("greedy"), "greedy"),
            sampling=_parse_curves(value.get("sampling"), "sampling"),
            sampled_draft_ms=None if sampled_draft is None else _of_batches(
                _for_all_sizes(sampled_draft, num_trees), "sampled_draft_ms", num_batches, num_trees
            ),
            sampled_plain_ms=None if sampled_plain is None else _positive(
                sampled_plain, "sampled_plain_ms", num_batches, "batch sizes"
            ),
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Returns the table in dictionaries, lists and numbers, as `parse` reads it."""
        return _in_lists(asdict(self))

    def for_batch(self, batch_size: int, is_sampling: bool = False) -> BatchCosts:
        """
        Returns what cycles with so many rows cost, greedy or sampled: between the measured ones what lies between,
        and beyond them what the last rows cost more.
        """
        draft, plain = self.draft_ms, self.plain_ms
        if is_sampling:
            draft, plain = self.sampled_draft_ms or draft, self.sampled_plain_ms or plain

        def at(values: Sequence[float]) -> float:
            return _at(batch_size, self.batch_sizes, values)

        is_beyond = len(self.batch_sizes) > 1 and batch_size > self.batch_sizes[-1]

        def of_sizes(rows: tuple[Numbers, ...]) -> Numbers:
            values = map(at, zip(*rows, strict=True))
            # What grows by noise may say that a larger tree costs less than a smaller one.
            return tuple(accumulate(values, max) if is_beyond else values)

        return BatchCosts(self.tree_sizes, of_sizes(self.verify_ms), of_sizes(draft), at(plain))

    def curves(self, is_sampling: bool) -> AcceptanceCurves | None:
        """Returns how often drafted tokens are accepted in this way of decoding, `None` where nobody knows."""
        by_depth = self.sampling if is_sampling else self.greedy
        return None if by_depth is None else AcceptanceCurves(by_depth)


_REQUIRED = ("machine", "dtype", "batch_sizes", "tree_sizes", "verify_ms", "draft_ms", "plain_ms")
_OPTIONAL = ("greedy", "sampling", "sampled_draft_ms", "sampled_plain_ms")


def _check_keys(value: Any, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"it must be a dictionary, got {type(value).__name__}")
    if missing := [name for name in required if name not in value]:
        raise ValueError(f"it lacks {', '.join(f'`{name}`' for name in missing)}")
    if unknown := [name for name in value if name not in (*required, *optional)]:
        raise ValueError(f"it has the unknown entry `{unknown[0]}`")


def _increasing(value: dict[str, Any], name: str, least: int) -> tuple[int, ...]:
    given = value[name]
    is_list = isinstance(given, (list, tuple)) and len(given) > 0 and all(type(number) is int for number in given)
    if not is_list or given[0] < least or any(a >= b for a, b in pairwise(given)):
        raise ValueError(f"its `{name}` must be a list of increasing integers of at least {least}, got {given!r}")
    return tuple(given)


def _numbers(given: Any, name: str, is_one: Callable[[float], bool], kind: str) -> Numbers:
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"its `{name}` must be a list of {kind} numbers, got {given!r}")
    for number in given:
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number) or not is_one(number):
            raise ValueError(f"its `{name}` must hold {kind} numbers, got {number!r}")
    return tuple(float(number) for number in given)


def _positive(given: Any, name: str, count: int, per: str) -> Numbers:
    numbers = _numbers(given, name, lambda number: number > 0, "positive")
    if len(numbers) != count:
        raise ValueError(f"its `{name}` must hold a number for each of {count} {per}, got {len(numbers)}")
    return numbers


def _of_batches(rows: Any, name: str, num_batches: int, num_trees: int) -> tuple[Numbers, ...]:
    if not isinstance(rows, (list, tuple)) or len(rows) != num_batches:
        raise ValueError(
            f"its `{name}` must be a list with a list for each of {num_batches} batch sizes, got {rows!r}"
        )
    return tuple(_positive(row, name, num_trees, "tree sizes") for row in rows)


def _for_all_sizes(rows: Any, num_trees: int) -> Any:
    """Earlier tables have one number for trees of all sizes."""
    if not isinstance(rows, (list, tuple)):
        return rows
    return [row if isinstance(row, (list, tuple)) else [row] * num_trees for row in rows]


def _parse_curves(value: Any, name: str) -> tuple[AcceptanceCurve, ...] | None:
    if value is None:
        return None
    # Earlier tables have one curve for all depths.
    by_depth = [value] if isinstance(value, dict) else value
    if not isinstance(by_depth, (list, tuple)) or not by_depth:
        raise ValueError(f"its `{name}` must be a list of curves, one for each depth, got {value!r}")
    try:
        return tuple(_parse_curve(curve) for curve in by_depth)
    except ValueError as error:
        raise ValueError(f"of its `{name}`, {error}") from None


def _parse_curve(value: Any) -> AcceptanceCurve:
    _check_keys(value, ("scores", "shares"))
    return AcceptanceCurve(
        _numbers(value["scores"], "scores", lambda number: number <= 0, "never positive"),
        _numbers(value["shares"], "shares", lambda number: 0 < number <= 1, "positive, at most 1:"),
    )


def _at(place: int, places: Sequence[int], values: Sequence[float]) -> float:
    """Interpolates; beyond the last place as between the last two, and never less than there."""
    if place <= places[-1] or len(places) == 1:
        return float(np.interp(place, places, values))
    slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
    return values[-1] + max(slope, 0.0) * (place - places[-1])


def _in_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_lists(item) for name, item in value.items()}
    return [_in_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


__all__ = ["BatchCosts", "CycleCostTable"]
