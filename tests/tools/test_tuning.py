"""Tuning: contests find what is fastest, what was measured is not measured again, and what is written is what won."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import gumiho, interrupt
from hub_cache import write_to_hub_cache
from origins import Origins
from targets import equals_plain, make_drafter, make_prompts, make_target
from training_data import DEMO_TARGET
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_gumiho import GumihoConfig, GumihoModel
from transformers_gumiho.generation.observers import observing
from transformers_gumiho.model.decoding_settings import DraftingSettings
from transformers_gumiho.tools import pairs
from transformers_gumiho.tools.benchmarking import BenchmarkArguments, benchmark
from transformers_gumiho.tools.measuring.timing import DecodingMode, DecodingTime, Runner
from transformers_gumiho.tools.tuning import (
    Standing,
    Tree,
    TuningArguments,
    TuningResult,
    command,
    contest,
    describe,
    tune,
)
from transformers_gumiho.tools.tuning.command import find_settings
from transformers_gumiho.tools.tuning.contest import compare
from transformers_gumiho.tools.tuning.trees import list_sizes, list_trees


OWN = Tree(20, 3, 5, 0.9)
PROMPTS = [[number, 900 + number] for number in range(18)]
DRAFTER: Any = SimpleNamespace(
    config=GumihoConfig.from_target(make_target().config),
    generation_config=SimpleNamespace(draft_vocabulary=[1, 2]),
)


@dataclass(frozen=True)
class Call:
    """What a planted machine was asked for; no tree for plain decoding."""

    tree: Tree | None
    prompts: tuple[int, ...]
    temperature: float
    settings: dict[str, Any]


@dataclass
class PlantedMachine:
    """
    A runner that decodes nothing, and says that it took what is planted.

    Attributes:
        tau: Tokens per cycle of a tree.
        cycle: Seconds of a cycle, for a tree and a number of rows; a step of plain decoding takes one.
        refused: A number of rows that it cannot decode.
        calls: What it was asked for.
    """

    tau: Callable[[Tree], float]
    cycle: Callable[[Tree, int], float]
    refused: int = 0
    calls: list[Call] = field(default_factory=list)

    def compare(
        self, modes: Sequence[DecodingMode], prompts: Sequence[Sequence[int]], temperature: float, seed: int
    ) -> list[DecodingTime]:
        if len(prompts) == self.refused:
            raise ValueError("It cannot verify drafts in a padded batch.")
        return [self.decode(mode, prompts, temperature, seed) for mode in modes]

    def decode(
        self, mode: DecodingMode, prompts: Sequence[Sequence[int]], temperature: float, turn: int
    ) -> DecodingTime:
        # A machine whose speed drifts, by the same for all ways of a turn, and that is busy with others now and then.
        speed, rows = 1.0 + turn % 3 + len(prompts), len(prompts)
        shape = {name: value for name, value in mode.settings.items() if name in Tree.__annotations__}
        tree = Tree(**shape, drafts_all_tokens="draft_vocabulary" in mode.settings) if shape else None
        self.calls.append(Call(tree, tuple(prompt[0] for prompt in prompts), temperature, mode.settings))
        if tree is None:
            return DecodingTime(1000 * speed, 1000, 1000)
        busy = 5.0 if (turn + tree.num_assistant_tokens) % 3 == 0 else 1.0
        num_cycles = round(1000 / self.tau(tree))
        sampling = 1.5 if temperature else 1.0
        return DecodingTime(num_cycles * speed * busy * sampling * self.cycle(tree, rows), 1000, num_cycles)


def tau_of(tree: Tree) -> float:
    """More tokens, a branching factor of 4, all depth and the sharp temperature are accepted further."""
    lost = abs(tree.branching_factor - 4) * 0.03 + abs(tree.draft_temperature - 0.3) * 0.4
    return 1 + min(tree.tree_depth, tree.num_assistant_tokens) ** 0.5 + tree.num_assistant_tokens**0.5 * 0.2 - lost


COSTS = (0.0, 0.004, 0.02, 0.2)  # of a node, each with another winner


def cycle_of(per_node: float) -> Callable[[Tree, int], float]:
    return lambda tree, rows: 1.3 + per_node * rows * tree.num_assistant_tokens + 0.05 * tree.tree_depth


def demo_trees(own: Tree = OWN, verifies_chains: bool = False) -> list[Tree]:
    return list_trees(DRAFTER.config, own, verifies_chains)


def find(
    machine: PlantedMachine, own: Tree = OWN, prompts: list[list[int]] = PROMPTS, **options: object
) -> TuningResult:
    args = replace(TuningArguments(), **{"tune_vocabulary": False} | options)
    return find_settings(machine, DRAFTER, demo_trees(own), prompts, args)


@pytest.mark.parametrize("per_node", COSTS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_contests_find_the_best_of_planted_costs(per_node: float, temperature: float) -> None:
    cycle = cycle_of(per_node)
    result = find(PlantedMachine(tau_of, cycle), temperature=temperature)
    cycles = {rows: cycle(tree, rows) for rows, tree in result.chosen.items()}
    winners = [max(demo_trees(), key=lambda tree: tau_of(tree) / cycle_of(cost)(tree, 1)) for cost in COSTS]
    best = winners[COSTS.index(per_node)]
    assert len({*winners}) == 4
    assert result.chosen[1] == best
    for rows in (4, 8):
        assert result.chosen[rows] == max(list_sizes(best), key=lambda tree: tau_of(tree) / cycle(tree, rows))
    assert result.settings == {
        "num_assistant_tokens": {str(rows): tree.num_assistant_tokens for rows, tree in result.chosen.items()},
        "branching_factor": best.branching_factor,
        "tree_depth": best.tree_depth,
        "draft_temperature": best.draft_temperature,
        "break_even": {
            kind: {str(rows): pytest.approx(dearer * seconds, abs=1e-3) for rows, seconds in cycles.items()}
            for kind, dearer in (("greedy", 1.0), ("sampled", 1.5))
        },
    }  # fmt: skip


def test_fewer_trees_decode_more_prompts_and_the_winner_others() -> None:
    machine = PlantedMachine(tau_of, cycle_of(0.02))
    result = find(machine)
    # Tuples of another number of rows, or of prompts that are in no contest.
    of_trees = [(call.prompts, call.tree) for call in machine.calls if len(call.prompts) == 1 and call.prompts[0] < 12]
    num_trees = len(demo_trees())
    assert 15 <= num_trees <= 18
    seen: dict[Tree | None, set[tuple[int, ...]]] = {}
    for prompts, tree in of_trees:
        seen.setdefault(tree, set()).add(prompts)
    sizes = Counter(len(prompts) for prompts in seen.values())
    half = -(-num_trees // 2)
    assert sizes == {3: num_trees - half, 6: half - -(-half // 2), 12: -(-half // 2) + 1}  # and plain decoding
    assert len(of_trees) == sum(sizes[count] * count for count in sizes), "nothing twice"
    # What stands in the report and in `break_even` is of prompts that decided nothing.
    final = {call.prompts for call in machine.calls if call.settings.get("prompt_lookup_num_tokens") == 0}
    assert {prompt for prompts in final for prompt in prompts} == set(range(12, 18))
    assert all(max(call.prompts) < 12 for call in machine.calls if call.prompts not in final)
    assert list(result.finals) == [(kind, rows) for kind in ("greedy", "sampled") for rows in (1, 4, 8)]


def test_where_plain_decoding_is_faster_is_said() -> None:
    result = find(PlantedMachine(lambda tree: 2.0, lambda tree, rows: 1.0 + 0.2 * rows))
    # A cycle takes 1.2, 1.8 and 2.6 steps, and half as many more where tokens are sampled.
    lines = describe(result).splitlines()
    assert [line for line in lines if "PLAIN" in line] == [
        f"PLAIN DECODING IS FASTER with {where}. Leave `assistant_model` out there."
        for where in ("8 rows, greedy", "4 rows, sampled", "8 rows, sampled")
    ]
    assert any(line.split() == ["1", "greedy", "20", "2.00", "1.20", "1.67"] for line in lines)
    assert describe(result).count("(the drafter's own)") == 1


def test_rows_in_which_the_target_verifies_nothing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(command.logger, "warning", warnings.append)
    result = find(PlantedMachine(tau_of, cycle_of(0.02), refused=4))
    assert list(result.settings["num_assistant_tokens"]) == ["1", "8"]
    assert warnings == ["Not tuned for 4 rows: It cannot verify drafts in a padded batch."]


@pytest.mark.parametrize("faster", ["its list", "all tokens"])
def test_the_draft_vocabulary_competes_with_all_tokens(faster: str) -> None:
    def cycle(tree: Tree, rows: int) -> float:
        return cycle_of(0.02)(tree, rows) * (0.9 if tree.drafts_all_tokens == (faster == "all tokens") else 1.0)

    result = find(PlantedMachine(tau_of, cycle), batch_sizes=[1], tune_vocabulary=True)
    assert [tree.drafts_all_tokens for tree in result.vocabularies] == [faster == "all tokens", faster != "all tokens"]
    assert result.settings.get("draft_vocabulary", "its list") == (None if faster == "all tokens" else "its list")
    remarks = ("(the drafter's own)", "(its draft vocabulary)", "(all tokens)")
    assert [describe(result).count(remark) for remark in remarks] == [1, 1, 1]


def test_calibrated_temperatures_are_kept() -> None:
    own = replace(OWN, draft_temperature=(0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1))
    trees = demo_trees(own)
    assert {tree.draft_temperature for tree in trees} == {own.draft_temperature}
    assert len(trees) == len(demo_trees()) - 5


def test_the_depth_of_drafters_without_parallel_heads_is_tuned() -> None:
    config = GumihoConfig.from_target(make_target().config, num_parallel_heads=0, num_serial_tokens=8)
    trees = list_trees(config, OWN, verifies_chains=False)
    assert trees[0] == OWN
    assert {tree.tree_depth for tree in trees if tree.num_assistant_tokens == 24} == {3, 5, 8}
    assert {tree.tree_depth for tree in trees if tree.branching_factor == 1} == {3, 5, 8}


def test_chains_are_all_that_competes_where_a_target_verifies_no_trees() -> None:
    trees = demo_trees(verifies_chains=True)
    # The drafter's own depth is the first one.
    assert [(tree.num_assistant_tokens, tree.branching_factor, tree.tree_depth) for tree in trees] == [
        (depth, 1, depth) for depth in (5, 1, 2, 3, 4, 6, 7)
    ]


def test_standings_take_the_median_of_ratios_within_turns() -> None:
    plain = [DecodingTime(seconds, 10, 10) for seconds in (10.0, 30.0, 10.0, 0.0)]
    drafted = [DecodingTime(seconds, 10, cycles) for seconds, cycles in ((10.0, 5), (45.0, 5), (90.0, 4), (0.0, 0))]
    # Cycles of 2 steps, 3 steps, and 22.5 while something else ran; the last text ended with its first token.
    plain[3] = drafted[3] = DecodingTime(0.1, 0, 0)
    standing = compare(list(zip(drafted, plain, strict=True)))
    assert standing == Standing(tau=pytest.approx(30 / 14), break_even=pytest.approx(3.0))
    with pytest.raises(ValueError, match=r"end with their first token\. Give other prompts"):
        compare([(drafted[3], plain[3])])


def test_a_single_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs two prompts, .*, got 1\. Raise `num_prompts`"):
        find(PlantedMachine(tau_of, cycle_of(0.02)), prompts=PROMPTS[:1])


def test_cycles_of_a_drafter_that_is_worth_nothing_are_timed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In ordinary decoding it pauses, and a contest of pauses would say nothing about trees."""
    monkeypatch.setattr(contest, "ROUNDS", (2,))
    target = make_target("llama", vocab_size=64)
    drafter, origins = make_drafter(target, break_even=None), Origins()
    before = drafter.generation_config.to_dict()
    prompts = [make_prompts([length])["input_ids"][0].tolist() for length in (3, 6, 4)]
    with observing(origins):
        find_settings(Runner(target, 0, 40), drafter, [Tree(12, 4, 7)], prompts, TuningArguments(batch_sizes=[1]))
        assert drafter.generation_config.to_dict() == before
        assert set(origins.sources) <= {"drafter", "end"}
        assert origins.sources.count("drafter") > 100
        target.generate(**make_prompts([5]), max_new_tokens=60, do_sample=False, assistant_model=drafter)
        assert "pause" in origins.sources


def test_where_the_settings_go_is_asked_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"has no folder of its own\. Give --output_dir"):
        tune(TuningArguments(target="nobody/nothing", assistant="nobody/drafter"))
    pair = {"target": str(DEMO_TARGET), "assistant": str(DEMO_TARGET.parent / "gumiho")}
    monkeypatch.setattr(command.os, "access", lambda path, _: str(path) != pair["assistant"])
    with pytest.raises(OSError, match=r"gumiho' cannot be written to\. Name another folder with --output_dir"):
        tune(TuningArguments(**pair, num_prompts=1))


def test_links_of_the_hubs_cache_are_not_written_through(tmp_path: Path) -> None:
    shutil.copytree(DEMO_TARGET.parent / "gumiho", tmp_path / "gumiho")
    files = [path for path in (tmp_path / "gumiho").iterdir() if path.is_file()]
    snapshot = write_to_hub_cache(tmp_path / "hub", "somebody/gumiho", files)
    contents = {path: path.read_bytes() for path in snapshot.iterdir()}
    pair = {"target": str(DEMO_TARGET), "assistant": str(snapshot)}
    for where in ({}, {"output_dir": str(snapshot)}):
        with pytest.raises(OSError, match=r"holds links to files .* Name another folder .*--output_dir"):
            tune(TuningArguments(**pair, **where, num_prompts=1))
    drafter = GumihoModel.from_pretrained(snapshot)
    with pytest.raises(OSError, match="holds links to files"):
        drafter.save_pretrained(snapshot)
    assert {path: path.read_bytes() for path in snapshot.iterdir()} == contents
    assert all(path.is_symlink() for path in snapshot.iterdir())


def test_a_pair_is_tuned_by_its_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings go into the drafter's own folder, unless another one is named."""
    drafter = tmp_path / "gumiho"
    shutil.copytree(DEMO_TARGET.parent / "gumiho", drafter)
    monkeypatch.setattr(pairs, "find_drafter", lambda _: str(drafter))
    result = find(PlantedMachine(tau_of, cycle_of(0.02)))
    monkeypatch.setattr(command, "find_settings", lambda *_: result)
    prompts = str(DEMO_TARGET.parent / "prompts.jsonl")
    assert tune(TuningArguments(pair="demo", prompts=prompts, num_prompts=2)) is result
    written = json.loads((drafter / "generation_config.json").read_text())
    assert written["num_assistant_tokens"] == result.settings["num_assistant_tokens"]
    assert {path.name for path in drafter.iterdir()} == {
        path.name for path in (DEMO_TARGET.parent / "gumiho").iterdir()
    }


def test_prompts_are_read_before_models_are_loaded(tmp_path: Path) -> None:
    missing = {"target": "nobody/nothing", "assistant": "nobody/drafter", "prompts": str(tmp_path / "missing.jsonl")}
    with pytest.raises(FileNotFoundError, match="There is no file"):
        tune(TuningArguments(**missing, output_dir=str(tmp_path)))
    with pytest.raises(FileNotFoundError, match="There is no file"):
        benchmark(BenchmarkArguments(**missing, output_dir=str(tmp_path / "results")))
    assert not (tmp_path / "results").exists()
    known = {"pair": "demo", "prompts": str(DEMO_TARGET.parent / "prompts.jsonl"), "output_dir": f"{__file__}/new"}
    for measure, options in ((tune, TuningArguments), (benchmark, BenchmarkArguments)):
        with pytest.raises(OSError, match=r"folder '.*/new' cannot be made: Not a directory. Name another one with"):
            measure(options(**known))
    with pytest.raises(ValueError, match="--batch_sizes must be at least 1, got 0"):
        BenchmarkArguments(**known, batch_sizes=[4, 0])


@pytest.mark.usefixtures("short_contests")
@pytest.mark.parametrize("has_prompts", [True, False])
def test_command_keeps_the_settings_with_the_drafter(
    has_prompts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["--prompts", DEMO_TARGET.parent / "prompts.jsonl"] if has_prompts else []
    all_rows = [1, 4] if has_prompts else [1]
    command = [
        "tune", "--target", DEMO_TARGET, "--assistant", DEMO_TARGET.parent / "gumiho", *prompts, "--num_prompts", 3,
        "--max_new_tokens", 6, "--batch_sizes", *all_rows, "--dtype", "float32", "--output_dir", tmp_path,
        *([] if has_prompts else ["--no_tune_vocabulary"]),
    ]  # fmt: skip
    if has_prompts:
        interrupt(Runner, "compare", 0, *command)
        assert capsys.readouterr().err.endswith("gumiho tune: Stopped. The drafter's settings are as they were.\n")
        assert not list(tmp_path.iterdir())
    gumiho(*command)
    captured = capsys.readouterr()
    assert (
        f"settings are in {tmp_path}; copy its generation_config.json over the drafter's to use them" in captured.out
    )
    assert "the fastest, on prompts that were not in the contests" in captured.out
    assert "<" in captured.err, "the bar has the time that is left"
    assert [path.name for path in tmp_path.iterdir()] == ["generation_config.json"]
    with pytest.raises(OSError, match=r"but a generation_config.json: decoding settings alone.*Copy that file over"):
        GumihoModel.from_pretrained(tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert list(settings["num_assistant_tokens"]) == list(map(str, all_rows))
    assert settings["full_tree_attention"] is True
    target = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    drafter = GumihoModel.from_pretrained(DEMO_TARGET.parent / "gumiho", dtype=torch.float32)
    drafter.generation_config = type(drafter.generation_config).from_pretrained(tmp_path)
    for rows in all_rows:
        for kind, sampling_temperature in (("greedy", None), ("sampled", 1.0)):
            read = DraftingSettings.from_generation_config(
                drafter.generation_config, drafter.config, sampling_temperature, rows
            )
            assert read.break_even == settings["break_even"][kind][str(rows)]
            assert read.num_assistant_tokens == settings["num_assistant_tokens"][str(rows)]
        assert (read.branching_factor, read.draft_temperature) == (
            settings["branching_factor"], settings["draft_temperature"]
        )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET)
    texts = ["import", "class A:", "for i in range(", "def"][: max(all_rows)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 1.0}):
        equals_plain(target, drafter, 3, **inputs, max_new_tokens=20, **sampling)
