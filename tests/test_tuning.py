"""Fitting trees to a machine: what is predicted is what happens."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from targets import make_drafter, make_target
from training_data import DEMO_TARGET, make_tokenizer
from transformers import AutoModelForCausalLM

from transformers_gumiho import GumihoModel
from transformers_gumiho.tuning import (
    AcceptanceProfile,
    Candidate,
    CycleCosts,
    TreeSettings,
    TuningResult,
    describe,
    profile_acceptance,
    rank_trees,
)
from transformers_gumiho.tuning.costs import tree_capacity


@pytest.mark.parametrize("branching_factor", [1, 3])
def test_profile_of_large_trees_tells_what_every_smaller_one_accepts(branching_factor: int) -> None:
    """The first cycle after a prompt, decoded under every size and depth, one by one."""
    target = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    drafter = GumihoModel.from_pretrained(DEMO_TARGET.parent / "gumiho", dtype=torch.float32)
    lines = (DEMO_TARGET.parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    tokenizer = make_tokenizer(None)
    prompts = [tokenizer(json.loads(line)["text"], return_tensors="pt")["input_ids"][0] for line in lines]
    settings = {"branching_factor": branching_factor, "draft_temperature": 1.0, "tree_depth": 7}
    before = drafter.generation_config.to_dict()
    # The prompt's own token and at least one cycle, of at most eight.
    profiles = [
        profile_acceptance(target, drafter, [prompt], 9, settings | {"num_assistant_tokens": 24}) for prompt in prompts
    ]
    assert drafter.generation_config.to_dict() == before
    lengths = set()
    drafter.generation_config.update(**settings)
    for size in (1, 2, 3, 5, 8, 24):
        for depth in (1, 2, 3, 5, 7):
            drafter.generation_config.update(num_assistant_tokens=size, tree_depth=depth)
            for prompt, profile in zip(prompts, profiles, strict=True):
                output = target.generate(
                    prompt[None], assistant_model=drafter, max_new_tokens=9, do_sample=False,
                    return_dict_in_generate=True,
                )  # fmt: skip
                expected = AcceptanceProfile(profile.needed[:1]).tau(size, depth)
                assert output.accepted_lengths[0][0] == expected
                lengths.add(expected)
    assert len(lengths) > 3


def make_costs(per_node: float) -> CycleCosts:
    verify = {size: 1.0 + per_node * size for size in (1, 4, 16, 64)}
    rest = {(b, d): {1: 0.1 * d, 64: 0.1 * d} for b in (1, 4) for d in (1, 2, 7)}
    return CycleCosts(verify=verify, rest=rest, plain=1.0)


def test_costs_between_the_measured_sizes_are_what_lies_between() -> None:
    costs = make_costs(0.5)
    assert costs.verify_seconds(10) == pytest.approx(6.0)
    assert costs.cycle_seconds(16, branching_factor=4, tree_depth=4) == pytest.approx(9.0 + 0.4)


def test_trees_hold_no_more_than_their_capacity() -> None:
    target = make_target("llama", vocab_size=30)
    for factor in (1, 2, 3):
        for depth in (1, 2):
            settings = {"num_assistant_tokens": 30, "branching_factor": factor, "tree_depth": depth}
            drafter = make_drafter(target, **settings)
            profile = profile_acceptance(target, drafter, [torch.tensor([1, 2])], 12, settings)
            found = profile.needed[np.isfinite(profile.needed)]
            assert found.size == 0 or found.max() <= tree_capacity(factor, depth, 2)
    assert tree_capacity(1, 7, 2) == 7
    assert tree_capacity(4, 1, 2) == 4
    assert tree_capacity(4, 2, 2) == 20


def test_ranking_finds_the_fastest_tree() -> None:
    generator = np.random.default_rng(0)
    profiles = {}
    for factor in (1, 4):
        needed = np.sort(generator.integers(1, 80, size=(50, 7, 7)).astype(float), axis=2)
        for depth in range(7):
            needed[:, depth, depth + 1 :] = np.inf
        profiles[factor, 1.0] = AcceptanceProfile(needed)
    sizes = range(1, 65)
    for per_node in (0.0, 0.01, 1.0):
        costs = make_costs(per_node)
        best = rank_trees(profiles, costs, sizes, num_serial_tokens=2, max_depth=7)[0]
        speeds = {
            (size, factor, depth): profiles[factor, 1.0].tau(size, depth) / costs.cycle_seconds(size, factor, depth)
            for size in sizes
            for factor in (1, 4)
            for depth in range(1, 8)
            if size <= tree_capacity(factor, depth, 2)
        }
        assert best.tokens_per_second == pytest.approx(max(speeds.values()))
    # Where verification costs nothing more, trees are large; where each token costs as much as a pass, tiny.
    free = rank_trees(profiles, make_costs(0.0), sizes, 2, 7)[0].settings.num_assistant_tokens
    dear = rank_trees(profiles, make_costs(1.0), sizes, 2, 7)[0].settings.num_assistant_tokens
    assert dear < 4 < 32 < free


def test_plain_decoding_is_named_where_it_is_faster() -> None:
    candidate = Candidate(TreeSettings(4, 1, 4, 1.0), tau=1.2, cycle_seconds=0.1)
    for plain, pays in ((10.0, True), (20.0, False)):
        measured = {"best": 12.0, "default": 11.0, "plain": plain}
        result = TuningResult(candidate, candidate, measured, [candidate], make_costs(0.1))
        assert result.speculation_pays == pays
        assert ("PLAIN DECODING IS FASTER" in describe(result)) != pays


def test_command_keeps_the_settings_with_the_drafter(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "transformers_gumiho.cli", "tune", "--target", DEMO_TARGET, "--assistant",
        DEMO_TARGET.parent / "gumiho", "--prompts", DEMO_TARGET.parent / "prompts.jsonl", "--num_prompts", "1",
        "--max_new_tokens", "12", "--max_tree_size", "4", "--repeats", "1", "--dtype", "float32",
        "--output_dir", tmp_path,
    ]  # fmt: skip
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert "tokens/s expected" in process.stdout
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert settings["num_assistant_tokens"] <= 4
    assert settings["full_tree_attention"] is True
    target = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    drafter = GumihoModel.from_pretrained(DEMO_TARGET.parent / "gumiho", dtype=torch.float32)
    drafter.generation_config = type(drafter.generation_config).from_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=drafter), plain)
