"""Batches within a budget of padded tokens: which rows each process reads, in which step."""

import random
from collections import Counter

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from transformers_gumiho.training.batches import SeededLengthGroups, ShareOfBatches, StepBatches
from transformers_gumiho.training.data.budget import within_budget


LENGTHS = [random.Random(0).choice([3, 17, 90, 200, 333, 700]) + n % 7 for n in range(500)] + [9000]
STEP, PASS = 4096, 1024


def steps_of(num_processes: int, epoch: int, tokens_per_pass: int = PASS) -> list[list[list[list[int]]]]:
    """The rows of each pass, by step and process."""
    samplers = [StepBatches(LENGTHS, STEP, tokens_per_pass, 5, index, num_processes) for index in range(num_processes)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler)
    return [list(step) for step in zip(*samplers, strict=True)]


def padded(rows: list[int]) -> int:
    return len(rows) * max((LENGTHS[row] for row in rows), default=0)


@pytest.mark.parametrize("num_processes", [1, 2, 8])
def test_each_epoch_has_each_row_once_within_the_budgets(num_processes: int) -> None:
    for epoch in (0, 1):
        steps = steps_of(num_processes, epoch)
        rows = [row for step in steps for share in step for of_pass in share for row in of_pass]
        assert sorted(rows) == [*range(len(LENGTHS))]
        for step in steps:
            passes = [of_pass for share in step for of_pass in share]
            assert len({len(share) for share in step}) == 1, "processes exchange gradients after as many passes"
            assert sum(map(padded, passes)) <= STEP or sum(map(len, passes)) == 1
            assert all(padded(of_pass) <= PASS or len(of_pass) == 1 for of_pass in passes)
            sizes = [sum(map(len, share)) for share in step]
            assert max(sizes) - min(sizes) <= len(step[0])


def test_the_rows_of_a_step_depend_on_epoch_and_seed_alone() -> None:
    """Not on processes or passes. They change from epoch to epoch, and their order is no order of length."""

    def rows_of(num_processes: int, epoch: int, tokens_per_pass: int = PASS) -> list[set[int]]:
        found = steps_of(num_processes, epoch, tokens_per_pass)
        return [{row for share in step for of_pass in share for row in of_pass} for step in found]

    one = rows_of(1, 1)
    assert one == rows_of(2, 1) == rows_of(8, 1) == rows_of(8, 1, tokens_per_pass=64)
    assert one != rows_of(1, 0)
    assert {frozenset(rows) for rows in one} != {frozenset(rows) for rows in rows_of(1, 0)}
    assert len(one) == len(rows_of(1, 0))
    longest = [max(LENGTHS[row] for row in rows) for rows in one]
    assert longest != sorted(longest, reverse=True)


def test_like_lengths_meet() -> None:
    passes = [of_pass for step in steps_of(2, 0) for share in step for of_pass in share if of_pass]
    assert sum(map(padded, passes)) < 1.15 * sum(LENGTHS)


def test_rows_that_fill_no_last_step_are_neither_repeated_nor_lost() -> None:
    for num_rows in (9, 10, 12):
        batches = BatchSampler(SequentialSampler(range(num_rows)), 2, drop_last=False)
        shares = [list(ShareOfBatches(batches, index, 2)) for index in (0, 1)]
        assert len(shares[0]) == len(shares[1]) == 3
        assert Counter(row for share in shares for batch in share for row in batch) == Counter(range(num_rows))
        shares = [list(ShareOfBatches(batches, index, 2, drop_last=True)) for index in (0, 1)]
        assert len(shares[0]) == len(shares[1]) == (3 if num_rows == 12 else 2)


def test_an_order_by_length_is_one_of_its_epoch() -> None:
    groups = SeededLengthGroups(4, LENGTHS, 0)
    first, _ = list(groups), list(groups)
    groups.set_epoch(1)
    assert list(groups) != first
    groups.set_epoch(0)
    assert list(groups) == first
    assert within_budget(range(3), [5, 9, 4], 8) == [[1], [0], [2]]
