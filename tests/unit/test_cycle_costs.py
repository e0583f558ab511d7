"""The setting `cycle_costs`: what a table must be, where it goes, and what lies between what was measured."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cycle_costs import make_cost_table
from targets import make_drafter, make_target

from transformers_gumiho import GumihoModel
from transformers_gumiho.drafting.settings import DraftingSettings
from transformers_gumiho.model.cycle_costs import CycleCostTable


CURVE = {"scores": [-3.0, -1.0], "shares": [0.1, 0.5]}


def test_table_comes_back_with_the_drafters_files(tmp_path: Path) -> None:
    table = make_cost_table(greedy=[CURVE, CURVE | {"shares": [0.2, 0.4]}])
    drafter = make_drafter(make_target(), cycle_costs=table)
    drafter.save_pretrained(tmp_path)
    loaded = GumihoModel.from_pretrained(tmp_path)
    assert loaded.generation_config.cycle_costs == table
    settings = DraftingSettings.from_generation_config(loaded.generation_config, loaded.config, None)
    assert settings.cycle_costs == CycleCostTable.parse(table)
    assert CycleCostTable.parse(settings.cycle_costs.as_dict()) == settings.cycle_costs
    assert make_drafter(make_target()).generation_config.cycle_costs is None


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([1, 2], r"but it must be a dictionary, got list\. Set it in"),
        ({"machine": "x"}, "but it lacks `dtype`, `batch_sizes`, `tree_sizes`, `verify_ms`, `draft_ms`, `plain_ms`"),
        (make_cost_table(speed=3), "but it has the unknown entry `speed`"),
        (make_cost_table(machine=None), "but its `machine` must be a text, got None"),
        (make_cost_table(batch_sizes=[4, 1]), r"`batch_sizes` must be a list of increasing integers .* \[4, 1\]"),
        (make_cost_table(batch_sizes=[0, 1]), "`batch_sizes` must be a list of increasing integers of at least 1"),
        (make_cost_table(tree_sizes=[1, 8, 64]), r"`tree_sizes` must begin with 0, the root alone, got \[1, 8, 64\]"),
        (make_cost_table(verify_ms=[[1.0, 2.0, 3.0]]), "`verify_ms` must be a list with a list for each of 2 batch"),
        (
            make_cost_table(verify_ms=[[1.0, 2.0]] * 2),
            "`verify_ms` must hold a number for each of 3 tree",
        ),
        (
            make_cost_table() | {"draft_ms": 4.0},
            "`draft_ms` must be a list with a list for each of 2 batch sizes, got 4.0",
        ),
        (
            make_cost_table() | {"draft_ms": [4.0, [1, 2]]},
            "`draft_ms` must hold a number for each of 3 tree sizes, got 2",
        ),
        (make_cost_table() | {"draft_ms": [4.0, "x"]}, "`draft_ms` must hold positive numbers, got 'x'"),
        (make_cost_table() | {"plain_ms": [1.0, 0.0]}, "`plain_ms` must hold positive numbers, got 0.0"),
        (make_cost_table() | {"plain_ms": [1.0, float("nan")]}, "`plain_ms` must hold positive numbers, got nan"),
        (
            make_cost_table(greedy=CURVE | {"shares": [0.5]}),
            "of its `greedy`, an .* must have a share for each",
        ),
        (make_cost_table(greedy=CURVE | {"shares": [0.0, 0.5]}), "of its `greedy`, its `shares` must hold .* got 0.0"),
        (make_cost_table(sampling={"scores": [-1.0]}), "of its `sampling`, it lacks `shares`"),
        (
            make_cost_table(sampling=[CURVE, CURVE | {"shares": [0.5]}]),
            "of its `sampling`, an .* a share for",
        ),
        (make_cost_table(sampling=[]), r"but its `sampling` must be a list of curves, one for each depth, got \[\]"),
        (
            make_cost_table(sampling=CURVE | {"scores": [-1.0, -3.0]}),
            "of its `sampling`, the `scores` of .* increase",
        ),
        (
            make_cost_table(greedy=CURVE | {"shares": [0.5, 0.1]}),
            "of its `greedy`, the `shares` of .* never decrease",
        ),
        (make_cost_table(sampled_draft_ms=[4.0]), "`sampled_draft_ms` must be a list with a list for each of 2 batch"),
        (make_cost_table(sampled_plain_ms=[4.0, 0]), "`sampled_plain_ms` must hold positive numbers, got 0"),
    ],
)
def test_malformed_tables_are_refused(costs: Any, message: str) -> None:
    drafter = make_drafter(make_target(), cycle_costs=costs)
    with pytest.raises(
        ValueError, match=f"`cycle_costs` must be None or a table as `gumiho tune` writes it, .*{message}"
    ):
        DraftingSettings.from_generation_config(drafter.generation_config, drafter.config, None)


def test_one_curve_is_that_of_all_depths() -> None:
    """Earlier tables have no more."""
    one, two = (CycleCostTable.parse(make_cost_table(greedy=curves)) for curves in (CURVE, [CURVE, CURVE]))
    scores, depths = torch.linspace(-5, 0, 12).reshape(2, 6), torch.arange(1, 13).reshape(2, 6)
    found, expected = (table.curves(is_sampling=False) for table in (one, two))
    assert torch.equal(found.log_probabilities(scores, depths), expected.log_probabilities(scores, depths))
    assert one.curves(is_sampling=True) is None
    assert one.as_dict()["greedy"] == [CURVE]


def test_one_number_of_drafting_is_that_of_all_sizes() -> None:
    """Earlier tables have no more."""
    number = {"draft_ms": [4.0, 5.0], "sampled_draft_ms": [6.0, 7.0]}
    numbers = {name: [[ms] * 3 for ms in of_batches] for name, of_batches in number.items()}
    one, three = (CycleCostTable.parse(make_cost_table() | given) for given in (number, numbers))
    assert one == three
    assert one.as_dict()["draft_ms"] == numbers["draft_ms"]


def test_sampled_cycles_have_costs_of_their_own() -> None:
    """Where they were measured; else they are taken to cost what greedy ones do."""
    measured = make_cost_table(sampled_draft_ms=[[6.0] * 3, [9.0, 10.0, 11.0]], sampled_plain_ms=[11.0, 14.0])
    greedy, sampled = (CycleCostTable.parse(measured).for_batch(4, is_sampling) for is_sampling in (False, True))
    assert greedy == CycleCostTable.parse(make_cost_table()).for_batch(4, True)
    assert sampled.plain_ms == 14.0
    assert (sampled.draft_ms, greedy.draft_ms) == ((9.0, 10.0, 11.0), (4.0, 4.0, 4.0))
    assert sampled.verify_ms == greedy.verify_ms
    assert CycleCostTable.parse(CycleCostTable.parse(measured).as_dict()).sampled_plain_ms == (11.0, 14.0)


def test_costs_between_and_beyond_what_was_measured() -> None:
    table = CycleCostTable.parse(make_cost_table(root_ms=10.0, node_ms=0.5, draft_ms=4.0, plain_ms=9.0))
    for rows in (1, 2, 4, 16):
        costs = table.for_batch(rows)
        assert costs.plain_ms == pytest.approx(9.0 + 0.5 * (rows - 1))
        for size in (0, 5, 64, 200):
            expected = 4.0 + 10.0 + 0.5 * (rows * (size + 1) - 1)
            assert costs.cycle_ms(size) == pytest.approx(expected)
            assert costs.undrafted_ms(size) == pytest.approx(costs.plain_ms + 0.5 * rows * size)


def test_larger_trees_never_cost_less_beyond_what_was_measured() -> None:
    """Though a node cost less with eight rows than with four, which is noise."""
    table = make_cost_table() | {
        "batch_sizes": [4, 8], "tree_sizes": [0, 1, 16], "plain_ms": [16.0, 22.0], "draft_ms": [3.0, 3.5],
        "verify_ms": [[15.0, 28.0, 30.0], [22.0, 27.0, 40.0]],
    }  # fmt: skip
    for rows in (8, 9, 16, 64):
        costs = CycleCostTable.parse(table).for_batch(rows)
        assert np.diff(costs.cycle_ms([0, 1, 2, 16, 20])).min() >= 0
        assert costs.verify_ms[-1] == pytest.approx(40.0 + (rows - 8) * 10 / 4), "and what was not noise is as before"
        assert costs.undrafted_ms([0, 1, 16]).min() == pytest.approx(costs.plain_ms)


def test_verifying_more_is_never_faster_than_plain_decoding() -> None:
    """Whatever a table says: speeds are compared, and have to be positive."""
    table = make_cost_table() | {"tree_sizes": [0, 20], "batch_sizes": [1], "plain_ms": [5.0], "draft_ms": [3.0]}
    costs = CycleCostTable.parse(table | {"verify_ms": [[10.0, 5.0]]}).for_batch(1)
    assert costs.undrafted_ms([0, 10, 20, 40]).tolist() == [5.0] * 4
    assert costs.cycle_ms([20, 40, 400]).tolist() == [8.0] * 3


def test_drafting_costs_what_is_drafted_and_not_what_is_verified() -> None:
    table = make_cost_table(node_ms=0.5) | {"draft_ms": [[2.0, 4.0, 6.0], [3.0, 6.0, 12.0]]}
    costs = CycleCostTable.parse(table).for_batch(1)
    for verified, drafted, draft_ms in ((0, 8, 4.0), (4, 4, 3.0), (4, 36, 5.0), (4, 64, 6.0), (70, 80, 7.0)):
        assert costs.cycle_ms(verified, drafted) == pytest.approx(10.0 + 0.5 * verified + draft_ms)
    assert costs.cycle_ms([0, 4, 8]) == pytest.approx([12.0, 15.0, 18.0]), "by default as much as is verified"
    assert CycleCostTable.parse(table).for_batch(2).draft_ms == pytest.approx((2 + 1 / 3, 4 + 2 / 3, 8.0))
