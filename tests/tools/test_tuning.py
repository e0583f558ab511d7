"""Fitting trees to a machine: what is predicted is what happens."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from targets import make_drafter, make_prompts, make_target
from training_data import DEMO_TARGET, make_tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from tuning_results import make_costs, make_result

from transformers_gumiho import GumihoModel
from transformers_gumiho.benchmarking import BenchmarkArguments, benchmark
from transformers_gumiho.cli import main
from transformers_gumiho.drafting.committed_tokens import CommittedTokens
from transformers_gumiho.drafting.drafter import GumihoDrafter
from transformers_gumiho.measuring import timing
from transformers_gumiho.measuring.timing import DecodingTime, time_drafted, time_plain
from transformers_gumiho.tuning import (
    AcceptanceProfile,
    Answer,
    Candidate,
    CycleCosts,
    DraftLosses,
    TreeSettings,
    TuningArguments,
    calibration,
    choose_contenders,
    costs,
    decode_answers,
    describe,
    find_best_tree,
    finding,
    measure_cycles,
    measure_draft_losses,
    profile_acceptance,
    rank_trees,
    tune,
)
from transformers_gumiho.tuning.calibration import LOG_TEMPERATURES, cross_fitted, features_of_drafts
from transformers_gumiho.tuning.contexts import typical_context
from transformers_gumiho.tuning.costs import smooth, tree_capacity


@pytest.mark.parametrize("branching_factor", [1, 3])
def test_profile_of_large_trees_tells_what_every_smaller_one_accepts(branching_factor: int) -> None:
    """The first cycle after each of some prompts, decoded under every size and depth, one by one."""
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
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    for size in (1, 2, 3, 5, 8, 24):
        for depth in (1, 2, 3, 5, 7):
            drafter.generation_config.update(num_assistant_tokens=size, tree_depth=depth)
            output = target.generate(
                **inputs, assistant_model=drafter, max_new_tokens=9, do_sample=False, return_dict_in_generate=True
            )
            for accepted_lengths, profile in zip(output.accepted_lengths, profiles, strict=True):
                expected = AcceptanceProfile(profile.needed[:1]).tau(size, depth)
                assert accepted_lengths[0] == expected
                lengths.add(expected)
    assert len(lengths) > 3


def test_costs_between_the_measured_sizes_are_what_lies_between() -> None:
    costs = make_costs(0.5)
    assert costs.verify_seconds(10) == pytest.approx(6.0)
    assert costs.cycle_seconds(16, branching_factor=4, tree_depth=4) == pytest.approx(9.0 + 0.4)


def test_trees_are_no_deeper_than_they_have_tokens() -> None:
    # With three tokens a tree of seven levels has three.
    costs = CycleCosts(verify={1: 0.0, 8: 0.0}, rest={(2, 2): {3: 2.0, 8: 2.0}, (2, 7): {3: 3.0, 8: 7.0}}, plain=1.0)
    assert costs.cycle_seconds(3, branching_factor=2, tree_depth=3) == pytest.approx(3.0)
    assert costs.cycle_seconds(8, branching_factor=2, tree_depth=3) == pytest.approx(3.0)
    assert costs.cycle_seconds(8, branching_factor=2, tree_depth=7) == pytest.approx(7.0)
    profiles = {(2, 1.0): AcceptanceProfile(np.ones((1, 7, 7)))}
    ranked = rank_trees(profiles, costs, range(1, 9), num_serial_tokens=2, max_depth=7)
    assert all(candidate.settings.tree_depth <= candidate.settings.num_assistant_tokens for candidate in ranked)


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
            if depth <= size <= tree_capacity(factor, depth, 2)
        }
        assert best.tokens_per_second == pytest.approx(max(speeds.values()))
    # Where verification costs nothing more, trees are large; where each token costs as much as a pass, tiny.
    free = rank_trees(profiles, make_costs(0.0), sizes, 2, 7)[0].settings.num_assistant_tokens
    dear = rank_trees(profiles, make_costs(1.0), sizes, 2, 7)[0].settings.num_assistant_tokens
    assert dear < 4 < 32 < free


def test_calibrated_temperatures_are_told_with_what_they_bring() -> None:
    candidate = Candidate(TreeSettings(4, 1, 4, 2 / 3), tau=1.2, cycle_seconds=0.1)
    text = describe(make_result(candidate, {"best": 12.0, "default": 11.0, "plain": 10.0}))
    assert "fitted to depths 1, 2, ...: 0.25 0.50\n" in text
    assert "13.2 tokens/s (tau 3.30), with one for all depths: 12.0 (tau 1.20); they help (+10.0%)" in text
    assert "\n      8    1800.00    250.00   3.30      13.2          2      7  0.25 0.50\n" in text


def test_expected_speeds_follow_the_speed_of_the_machine() -> None:
    """Cycles were timed while a plain step took a second; later the machine is ten times as fast."""
    candidate = Candidate(TreeSettings(4, 1, 4, 1.0), tau=2.4, cycle_seconds=2.0)
    text = describe(make_result(candidate, {"best": 12.5, "default": 10.0, "plain": 10.0}))
    assert (
        "plain decoding: 10.0 tokens/s measured, 1.0 when cycles were timed; what is expected from here on is " in text
    )
    assert "settings before: 12.0 tokens/s expected, 10.0 measured (+20%), 1.00 times plain\n" in text
    assert "best settings: 12.0 tokens/s expected, 12.5 measured (-4%), 1.25 times plain\n" in text
    assert "\n   132.0      12.6        8          2      7  0.25 0.50\n    12.0      12.0        4 " in text


def test_plain_decoding_is_named_where_it_is_faster() -> None:
    candidate = Candidate(TreeSettings(4, 1, 4, 1.0), tau=1.2, cycle_seconds=0.1)
    for plain, pays in ((10.0, True), (20.0, False)):
        measured = {"best": 12.0, "default": 11.0, "plain": plain}
        result = make_result(candidate, measured)
        assert result.speculation_pays == pays
        assert ("PLAIN DECODING IS FASTER" in describe(result)) != pays


def test_features_of_a_text_are_those_of_drafting_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees that keep every serial path, so that the text's own is always among them."""
    target = make_target(vocab_size=4)
    settings = {"branching_factor": 16, "num_assistant_tokens": 200, "tree_depth": 7}
    drafter = make_drafter(target, **settings)
    heads, drafted, roots = drafter.config.num_parallel_heads, [], []
    draft, best_tokens = GumihoDrafter.draft, GumihoDrafter._best_tokens  # noqa: SLF001

    def recording_draft(self: GumihoDrafter, committed: CommittedTokens) -> Any:
        roots.append((roots[-1] if roots else 0) + committed.accepted_lengths[0])
        drafted.append([])
        return draft(self, committed)

    def recording_best_tokens(self: GumihoDrafter, features: torch.Tensor, *args: Any) -> Any:
        is_parallel = len(drafted[-1]) == 2
        drafted[-1].extend(features[0].view(heads, -1, features.shape[-1]) if is_parallel else [features[0]])
        return best_tokens(self, features, *args)

    monkeypatch.setattr(GumihoDrafter, "draft", recording_draft)
    monkeypatch.setattr(GumihoDrafter, "_best_tokens", recording_best_tokens)
    prompt = make_prompts([5])["input_ids"][0] % 3 + 1  # 0 is padding
    (answer,) = decode_answers(target, drafter, [prompt], 24)
    found = features_of_drafts(target, drafter, answer)
    assert len(found) == 7
    num_checked = 0
    for root, features_of_depths in zip(roots, drafted, strict=True):
        paths = set()
        for depth, (features, tokens) in enumerate(found, start=1):
            if root + depth >= len(answer.tokens):
                continue
            place = root - answer.prompt_length
            assert tokens[place] == answer.tokens[root + depth]
            distances = (features_of_depths[depth - 1] - features[place]).norm(dim=-1)
            assert distances.min() < 1e-9
            assert (distances < 1e-3).sum() == 1
            paths |= {int(distances.argmin())} if depth > 2 else set()
            num_checked += 1
        assert len(paths) <= 1  # all heads look ahead from one path
    assert num_checked > 30


def test_calibration_recovers_how_much_too_sure_each_depth_is(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    target = make_target()
    drafter = make_drafter(target)
    too_sure = [0.25, 0.5, 1.0, 1.7, 2.5, 0.8]

    def synthetic(*_: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for factor in too_sure:
            logits = 2 * torch.randn(4000, 30)
            tokens = torch.multinomial(logits.softmax(dim=-1), 1).squeeze(1)
            logits[0] = torch.nan  # an overflow of the drafter
            found.append((logits * factor, tokens))
        return [*found, (torch.empty(0, 30), torch.empty(0, dtype=torch.long))]

    monkeypatch.setattr(calibration, "features_of_drafts", synthetic)
    monkeypatch.setattr(calibration, "output_head", lambda _: lambda features: features)
    losses = measure_draft_losses(target, drafter, [Answer(torch.zeros(9), 1)] * 3, chunk_size=701)
    assert losses.counts.tolist() == [[3999] * 6 + [0]] * 3
    # No text is long enough for the deepest, which goes on as the one above.
    assert losses.best_temperatures() == pytest.approx([*too_sure, 0.8], rel=0.04)


def test_prompts_are_profiled_with_temperatures_fitted_on_the_others() -> None:
    # Answer a is likeliest at temperature `LOG_TEMPERATURES[5 + a]`.
    curves = (LOG_TEMPERATURES[None] - LOG_TEMPERATURES[5:9, None]).square()
    losses = DraftLosses(curves[:, None], torch.ones(4, 1, dtype=torch.long))
    fitted, of_prompts = cross_fitted(losses)
    middle_of_odd, middle_of_even = LOG_TEMPERATURES[[7, 6]].exp().tolist()
    assert [t[0] for t in of_prompts] == pytest.approx([middle_of_odd, middle_of_even] * 2, rel=0.01)
    assert fitted[0] == pytest.approx(float(LOG_TEMPERATURES[6:8].mean().exp()), rel=0.01)
    alone = DraftLosses(losses.sums[:1], losses.counts[:1])
    assert cross_fitted(alone) == (alone.best_temperatures(), [alone.best_temperatures()])
    with pytest.raises(ValueError, match=r"have one token at most, none of them drafted\. Give others"):
        DraftLosses(losses.sums, torch.zeros_like(losses.counts)).best_temperatures()


def test_prediction_and_check_count_the_same_tokens_and_cycles() -> None:
    target = make_target()
    settings = {"num_assistant_tokens": 5, "branching_factor": 2, "tree_depth": 6, "draft_temperature": [0.5, 1.0]}
    drafter = make_drafter(target)
    prompts = [make_prompts([length], seed=length)["input_ids"][0] for length in (3, 6, 9)]
    profile = profile_acceptance(target, drafter, prompts, 20, settings)
    tokens = cycles = 0
    for prompt in prompts:
        taken = time_drafted(target, drafter, prompt[None], settings, split=True, max_new_tokens=20, do_sample=False)
        assert 0 < taken.verify_seconds < taken.cycle_seconds
        # What is told apart adds up: the last cycle drafts nothing after it.
        cycles_but_last = (taken.num_cycles - 1) * taken.cycle_seconds
        assert 0 < taken.setup_seconds < taken.seconds - cycles_but_last - taken.verify_seconds / 2
        assert taken.num_tokens == 19
        tokens, cycles = tokens + taken.num_tokens, cycles + taken.num_cycles
    assert profile.tau(5, 6) == pytest.approx(tokens / cycles)
    assert time_plain(target, prompts[0][None], max_new_tokens=20, do_sample=False).num_tokens == 19


def test_time_of_plain_decoding_is_that_of_the_steps_after_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    target, forward, passes, now = make_target(), LlamaForCausalLM.forward, [], [0.0]

    def timed_forward(self: LlamaForCausalLM, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        passes.append(input_ids.shape[1])
        now[0] += 1.0 if input_ids.shape[1] > 1 else 0.02
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", timed_forward)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    taken = time_plain(target, make_prompts([6])["input_ids"], max_new_tokens=11, do_sample=False)
    assert passes == [6] + [1] * 10
    assert (taken.num_tokens, taken.seconds) == (10, pytest.approx(0.2))


def test_slow_spells_of_the_machine_do_not_make_a_cycle_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slow whenever `b` is timed but once, for plain decoding right before as well."""
    speeds = iter([1.0, 1.0, 1.0, 3.0, 1.0, 3.0, 1.0, 1.0])  # of `a` and `b` in turns; the first of each warms up
    now = [1.0]

    def plain(*_: Any, **__: Any) -> DecodingTime:
        now[0] = next(speeds)
        return DecodingTime(num_tokens=10, seconds=now[0] * 10)

    def drafted(_: Any, __: Any, ___: Any, settings: dict[str, Any], **____: Any) -> DecodingTime:
        return DecodingTime(num_tokens=10, num_cycles=5, seconds=now[0] * 5 * settings["seconds"])

    monkeypatch.setattr(costs, "time_plain", plain)
    monkeypatch.setattr(costs, "time_drafted", drafted)
    settings = {"a": {"seconds": 2.0}, "b": {"seconds": 1.5}}
    target = make_target()
    assert measure_cycles(target, make_drafter(target), torch.arange(3), settings, 8) == ({"a": 2.0, "b": 1.5}, 1.0)


def test_larger_trees_never_cost_less() -> None:
    assert smooth({1: 3.0, 2: 1.0, 4: 2.0, 8: 5.0, 16: 4.0, 32: 6.0}) == {
        1: 2.0, 2: 2.0, 4: 2.0, 8: 4.5, 16: 4.5, 32: 6.0,
    }  # fmt: skip


def test_cycles_are_timed_in_a_context_of_average_length() -> None:
    answers = [Answer(torch.arange(100), 20), Answer(torch.arange(60), 40)]
    # Contexts grow from 20 to 100 and from 40 to 60: 80 steps have 60 tokens on average, and 20 have 50.
    assert typical_context(answers, 32).tolist() == list(range(58 - 16))
    assert typical_context([Answer(torch.arange(3), 1)], 32).tolist() == [0]


def test_short_texts_bear_the_setup_of_each() -> None:
    costs = CycleCosts(verify={4: 0.9}, rest={(1, 4): {4: 0.1}}, plain=1.0, setup=2.0)
    profile = AcceptanceProfile(np.array([[[1, 2, 3, np.inf]] * 4]))  # tau 4
    ranked = [rank_trees({(1, 1.0): profile}, costs, [4], 2, 4, length)[0] for length in (8, 800, np.inf)]
    # 8 tokens: two cycles of a second each, and two seconds before them.
    assert [tree.tokens_per_second for tree in ranked] == pytest.approx([2.0, 800 / 202, 4.0])


def test_trees_that_are_alike_do_not_compete_with_each_other() -> None:
    shapes = [(9, 4, 0.5), (10, 4, 0.5), (9, 4, 1.0), (9, 2, 0.5), (20, 4, 0.5), (3, 1, 0.5)]
    ranked = [Candidate(TreeSettings(n, b, 7, t), 10.0 - i, 1.0) for i, (n, b, t) in enumerate(shapes)]
    assert choose_contenders(ranked, 3) == [ranked[0], ranked[3], ranked[4]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_tree_that_is_measured_to_be_fastest_wins(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    target = make_target()
    drafter = make_drafter(target, num_assistant_tokens=9, branching_factor=3)
    before = drafter.generation_config.to_dict()
    prompts = [make_prompts([length])["input_ids"][0] for length in (4, 6)]
    competing: list[TreeSettings] = []

    def slowest_first(
        _target: Any, _drafter: Any, _prompts: Any, trees: list[TreeSettings], *_: Any, **__: Any
    ) -> Any:
        competing[:] = trees
        return {None: 0.5} | {tree: 1.0 + place for place, tree in enumerate(trees)}

    monkeypatch.setattr(finding, "measure_in_turns", slowest_first)
    monkeypatch.setattr(finding, "choose_vocabulary", lambda *_, **__: pytest.fail("not asked for"))
    monkeypatch.setattr(finding, "BRANCHING_FACTORS", (1, 2))
    monkeypatch.setattr(finding, "DRAFT_TEMPERATURES", (0.5, 1.0))
    for max_tree_size in (4, 12):
        args = TuningArguments(
            "", "", max_new_tokens=8, max_tree_size=max_tree_size, repeats=1, temperature=temperature,
            tune_vocabulary=False,
        )  # fmt: skip
        result = find_best_tree(target, drafter, prompts, args)
        *contenders, default = competing
        assert result.default.settings == default
        assert default.num_assistant_tokens == 9
        # What the drafter had competes where it is no larger than was asked for.
        assert result.best.settings == (default if max_tree_size == 12 else contenders[-1])
        assert all(tree.num_assistant_tokens <= max_tree_size for tree in contenders)
        assert len(result.calibrated.settings.draft_temperature) == 7
        assert isinstance(result.constant.settings.draft_temperature, float)
    assert drafter.generation_config.to_dict() == before


def test_where_the_settings_go_is_asked_before_anything_is_measured() -> None:
    with pytest.raises(SystemExit, match="not a folder; give --output_dir"):
        tune(TuningArguments(target="nobody/nothing", assistant="nobody/drafter"))


def test_prompts_are_read_before_models_are_loaded(tmp_path: Path) -> None:
    missing = {"target": "nobody/nothing", "assistant": "nobody/drafter", "prompts": str(tmp_path / "missing.jsonl")}
    with pytest.raises(FileNotFoundError, match="to read prompts from"):
        tune(TuningArguments(**missing, output_dir=str(tmp_path)))
    with pytest.raises(FileNotFoundError, match="to read prompts from"):
        benchmark(BenchmarkArguments(**missing, output_dir=str(tmp_path / "results")))
    assert not (tmp_path / "results").exists()


def test_command_keeps_the_settings_with_the_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Besides the drafter's own; each takes seconds.
    monkeypatch.setattr(finding, "BRANCHING_FACTORS", (1, 14))
    monkeypatch.setattr(finding, "DRAFT_TEMPERATURES", (0.3,))
    command = [
        "gumiho", "tune", "--target", DEMO_TARGET, "--assistant", DEMO_TARGET.parent / "gumiho", "--prompts",
        DEMO_TARGET.parent / "prompts.jsonl", "--num_prompts", "2", "--max_new_tokens", "10", "--max_tree_size", "4",
        "--repeats", "1", "--dtype", "float32", "--output_dir", tmp_path,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    main()
    told = capsys.readouterr().out
    assert "tokens/s expected" in told
    assert f"the settings are in {tmp_path}; copy its generation_config.json over the drafter's to use them" in told
    with pytest.raises(OSError, match=r"but a generation_config.json: decoding settings alone.*Copy that file over"):
        GumihoModel.from_pretrained(tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert settings["num_assistant_tokens"] <= 4
    assert isinstance(settings["draft_temperature"], (float, list))
    assert "draft temperatures fitted to depths" in told
    assert settings["full_tree_attention"] is True
    assert "tau lost" in told
    assert len(settings["draft_vocabulary"] or range(4096)) in (4096, 2048, 1024, 512, 256)
    # Written where sizes that fit gain, which a few prompts on a busy machine do not tell.
    costs = settings.get("cycle_costs")
    assert (costs is None) == ("so the size stays fixed" in told)
    assert costs is None or (costs["dtype"], costs["tree_sizes"][0]) == ("float32", 0)
    assert "sizes that fit each cycle" in told
    target = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    drafter = GumihoModel.from_pretrained(DEMO_TARGET.parent / "gumiho", dtype=torch.float32)
    drafter.generation_config = type(drafter.generation_config).from_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=drafter), plain)
