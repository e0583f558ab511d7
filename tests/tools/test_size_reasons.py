"""Why a cycle had its size: what `gumiho show` says of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cycle_costs import make_cost_table
from targets import make_drafter, make_prompts, make_target
from training_data import DEMO_TARGET
from transformers import GenerationConfig

from transformers_gumiho import GumihoModel
from transformers_gumiho.drafting.tree_size import ContextRun, DraftingPause, SizeChoice
from transformers_gumiho.presenting import Cycle, ShowArguments, show, watch_cycles
from transformers_gumiho.presenting.size_reasons import describe_size


def test_reason_is_told_in_a_line() -> None:
    choice = SizeChoice(
        size=8, sizes=(0, 4, 8, 16, 24, 32), expected=(0.0, 1.5, 2.0, 2.2, 2.3, 2.4),
        cycle_ms=(15.0, 15.5, 16.0, 20.0, 24.0, 30.0), plain_ms=10.0, correction=0.8,
    )  # fmt: skip
    assert describe_size(choice) == (
        "size 8 of 32: 2.00 accepted tokens expected (x 0.80, as observed) in 16.0 ms, 188 tokens/s "
        "(4: 161, 16: 160, 24: 138, 32: 113, plain: 100)"
    )
    pause = DraftingPause(drafted_speed=80.0, undrafted_speed=100.0, num_left=3)
    assert describe_size(pause) == (
        "nothing drafted: the newest drafts gave 80 tokens/s, without the drafter 100; tried again after 3 more cycles"
    )
    assert describe_size(replace(pause, num_left=1)).endswith("tried again after 1 more cycle")
    assert describe_size(replace(pause, num_left=0)).endswith("tried again in the next cycle")
    assert describe_size(replace(pause, size=7)).startswith("7 tokens from the context alone: the newest drafts gave")
    assert describe_size(ContextRun(size=20, expected=14.0, cycle_ms=60.0)) == (
        "20 tokens from the context alone, a run, as all before were right: 14.00 accepted tokens expected in 60.0 "
        "ms, 250 tokens/s"
    )


@pytest.mark.parametrize("has_costs", [True, False])
def test_show_tells_the_reason_of_its_cycle(
    has_costs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = GumihoModel.from_pretrained(DEMO_TARGET.parent / "gumiho", dtype=torch.float32)
    if has_costs:
        drafter.generation_config.cycle_costs = make_cost_table(node_ms=1.0, dtype="float32")
    drafter.save_pretrained(tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).cycle_costs == drafter.generation_config.cycle_costs
    options = ShowArguments(
        target=str(DEMO_TARGET), assistant=str(tmp_path), dtype="float32", prompt="def read(self):", step=2,
        output=str(tmp_path / "tree.svg"),
    )  # fmt: skip
    cycle = show(options)
    lines = capsys.readouterr().out.splitlines()
    picture = (tmp_path / "tree.svg").read_text(encoding="utf-8")
    assert ("as often as such paths were accepted" in picture) == has_costs
    assert any("as often as such paths were accepted" in line for line in lines) == has_costs
    last_line = next(line for line in reversed(lines) if line and "tree.svg" not in line)
    if has_costs:
        assert last_line == describe_size(cycle.reason)
        assert last_line.startswith(f"size {len(cycle.tokens) - 1} of 12: ")
    else:
        assert cycle.reason is None
        assert "were expected, the sum" in last_line


def test_reasons_do_not_outlive_their_generation() -> None:
    target = make_target()
    drafter = make_drafter(target, num_assistant_tokens=9, branching_factor=3)
    cycles: list[Cycle] = []
    with watch_cycles(cycles.append):
        for costs in (make_cost_table(), None):
            cycles.clear()
            drafter.generation_config.cycle_costs = costs
            target.generate(**make_prompts([5]), max_new_tokens=12, do_sample=False, assistant_model=drafter)
            assert cycles
            assert all((cycle.reason is not None) == (costs is not None) for cycle in cycles)
