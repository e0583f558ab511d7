"""Choosing a draft vocabulary: what is counted where, what is measured with it, and what is kept."""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from targets import make_drafter, make_target
from torch import nn
from training_data import DEMO_TARGET
from transformers import AutoModelForCausalLM, PreTrainedModel
from tuning_results import make_result

from transformers_gumiho import GumihoModel
from transformers_gumiho.measuring.timing import DecodingTime
from transformers_gumiho.tuning import (
    Answer,
    Candidate,
    TreeSettings,
    TuningArguments,
    VocabularyCandidate,
    VocabularyChoice,
    choose_vocabulary,
    command,
    contest,
    decode_answers,
    decode_in_turns,
    describe,
    finding,
    profile_acceptance,
    rank_on_other_half,
    rank_tokens,
    tune,
    vocabulary,
)


VOCAB_SIZE = 32
# All that the target below says.
SAID = [3, 17, 21, 30]
TREE = TreeSettings(num_assistant_tokens=6, branching_factor=2, tree_depth=7, draft_temperature=2 / 3)
PROMPTS = [torch.tensor(ids) for ids in ([1, 2], [3, 1, 4], [2, 7], [5, 1])]


@pytest.fixture
def target() -> PreTrainedModel:
    """Prefers a few tokens by so much that it says no others."""
    target = make_target(vocab_size=VOCAB_SIZE)
    bias = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    bias[SAID] = 50.0
    target.lm_head.bias = nn.Parameter(bias)
    return target


@pytest.fixture
def answers(target: PreTrainedModel) -> list[Answer]:
    found = decode_answers(target, make_drafter(target), PROMPTS, 24)
    assert {token for answer in found for token in answer.new_tokens.tolist()} == set(SAID)
    return found


@pytest.fixture
def contests(monkeypatch: pytest.MonkeyPatch) -> list[dict[VocabularyCandidate, list[dict[str, Any]]]]:
    """Receives who competed; the last wins. Cycles cost the less, the fewer tokens there are, and 16 at least."""
    seen = []

    def cycles(_target: Any, _drafter: Any, _context: Any, settings: Mapping[int, Any], *_: Any, **__: Any) -> Any:
        for size, of_size in settings.items():
            assert len(of_size["draft_vocabulary"] or range(VOCAB_SIZE)) == size
        return {size: 1e-3 * (16 + size) for size in settings}, 0.1

    def last_wins(_target: Any, _drafter: Any, _prompts: Any, ways: Mapping[Any, Any], *_: Any, **__: Any) -> Any:
        seen.append(dict(ways))
        return {contest.PLAIN: 5.0} | {way: 10.0 + place for place, way in enumerate(ways)}

    monkeypatch.setattr(vocabulary, "measure_cycles", cycles)
    monkeypatch.setattr(vocabulary, "decode_in_turns", last_wins)
    monkeypatch.setattr(vocabulary, "SMALLEST_VOCABULARY", 4)
    return seen


def test_tokens_are_ranked_by_how_often_they_occur() -> None:
    generator = torch.Generator().manual_seed(0)
    answers = [Answer(torch.randint(0, 40, (50,), generator=generator).square() // 40, 20) for _ in range(3)]
    counts = Counter(torch.cat([answer.tokens for answer in answers]).tolist())
    ranked = rank_tokens(answers, 50)
    assert ranked == sorted(range(50), key=lambda token: (-counts[token], token))
    assert max(counts.values()) > 5
    assert sum(count == 0 for count in map(counts.__getitem__, range(50))) > 5


def test_no_half_of_the_answers_counts_for_itself() -> None:
    answers = [Answer(torch.tensor([row, 9]), 1) for row in range(5)]
    found = rank_on_other_half(answers, 10)
    assert found[0] == found[2] == found[4] == [9, 1, 3, 0, 2, 4, 5, 6, 7, 8]
    assert found[1] == found[3] == [9, 0, 2, 4, 1, 3, 5, 6, 7, 8]


def test_small_vocabulary_of_all_that_is_said_loses_nothing_and_wins(
    target: PreTrainedModel, answers: list[Answer], contests: list[Any]
) -> None:
    drafter = make_drafter(target)
    before = drafter.generation_config.to_dict()
    answers = [Answer(answer.new_tokens, 0) for answer in answers]
    choice = choose_vocabulary(target, drafter, PROMPTS, answers, TREE, 24)
    assert drafter.generation_config.to_dict() == before
    assert [candidate.size for candidate in choice.candidates] == [32, 16, 8, 4]
    assert choice.whole.token_ids is None
    assert choice.whole.tau > 1.2
    assert {candidate.tau for candidate in choice.candidates} == {choice.whole.tau}
    assert sorted(choice.chosen.token_ids) == SAID
    assert choice.chosen.tokens_per_second == pytest.approx(choice.whole.tau / 0.020)
    assert list(choice.measured.values()) == [10.0, 11.0]
    assert choice.plain == 5.0
    # Cycles were timed while plain decoding was twice as fast as in the contest.
    assert choice.step_seconds == 0.1
    assert choice.expected_speed(choice.chosen) == pytest.approx(choice.whole.tau / 0.020 / 2)


def test_tokens_that_only_the_own_half_has_are_missed(
    target: PreTrainedModel, answers: list[Answer], contests: list[Any]
) -> None:
    """What the even prompts are measured with is counted on texts that hold nothing of what is said, and is bad."""
    drafter = make_drafter(target)
    foreign = Answer(torch.tensor([5, 6, 7, 8, 5, 6, 7, 8]), 2)
    answers = [foreign if row % 2 else Answer(answer.new_tokens, 0) for row, answer in enumerate(answers)]
    smallest = choose_vocabulary(target, drafter, PROMPTS, answers, TREE, 24).candidates[-1]
    assert [sorted(part) for part in smallest.of_prompts] == [[5, 6, 7, 8], SAID] * 2
    settings = [TREE.as_dict() | {"draft_vocabulary": ids} for ids in ([5, 6, 7, 8], SAID) * 2]
    tau = profile_acceptance(target, drafter, PROMPTS, 24, settings).tau(6, 7)
    assert smallest.tau == tau
    alone = profile_acceptance(target, drafter, PROMPTS[::2], 24, settings[0])
    assert alone.tau(6, 7) == 1.0
    # In its contest, too.
    (contest_ways,) = contests
    assert len(contest_ways) == 2
    for candidate, of_prompts in contest_ways.items():
        assert [of_prompt["draft_vocabulary"] for of_prompt in of_prompts] == candidate.of_prompts


def test_contest_decodes_each_prompt_with_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    seen: dict[Any, list[tuple[Any, Any]]] = {"a": [], "b": []}

    def drafted(_target: Any, _drafter: Any, ids: torch.Tensor, settings: dict[str, Any], **_: Any) -> DecodingTime:
        seen[settings["way"]].append((ids.tolist()[0], settings["prompt"]))
        return DecodingTime(num_tokens=6, seconds=2.0 if settings["way"] == "a" else 3.0)

    monkeypatch.setattr(contest, "time_drafted", drafted)
    ways = {way: [{"way": way, "prompt": prompt.tolist()} for prompt in PROMPTS] for way in "ab"}
    speeds = decode_in_turns(target, make_drafter(target), PROMPTS, ways, 4)
    expected = [(prompt.tolist(), prompt.tolist()) for prompt in (PROMPTS[0], *PROMPTS)]
    assert seen == {"a": expected, "b": expected}
    assert (speeds["a"], speeds["b"]) == (3.0, 2.0)
    assert speeds[contest.PLAIN] > 0


def make_candidate(size: int, tau: float, seconds: float, kind: str = "counted") -> VocabularyCandidate:
    token_ids = None if kind == "all" else list(range(size))
    return VocabularyCandidate(token_ids, [token_ids] * 2, size, kind == "counted", tau, seconds)


def test_only_what_should_be_faster_competes_with_what_there_was() -> None:
    whole = make_candidate(4096, 4.0, 1.0, "all")
    given = make_candidate(3000, 1.0, 1.0, "given")
    slower, faster, fastest = (
        make_candidate(2048, 3.9, 1.0),
        make_candidate(1024, 3.9, 0.9),
        make_candidate(512, 3, 0.6),
    )
    contenders = vocabulary.choose_vocabulary_contenders
    assert contenders([whole, slower]) == [whole]
    assert contenders([whole, make_candidate(2048, 4.0, 1.0)]) == [whole]
    assert contenders([whole, slower, faster, fastest]) == [whole, fastest]
    assert contenders([whole, given, slower]) == [whole, given]
    assert contenders([whole, given, slower, faster]) == [whole, given, faster]


@pytest.mark.parametrize("settings", [{}, {"draft_vocabulary": [3, 4, 5]}])
def test_without_another_half_nothing_is_counted(
    settings: dict[str, Any], target: PreTrainedModel, answers: list[Answer], contests: list[Any]
) -> None:
    drafter = make_drafter(target, **settings)
    choice = choose_vocabulary(target, drafter, PROMPTS[:1], answers[:1], TREE, 24)
    if not settings:
        assert choice is None
        return
    # What a drafter comes with competes however bad it is: it is what there was.
    assert [candidate.token_ids for candidate in choice.candidates] == [None, [3, 4, 5]]
    assert list(contests[0]) == choice.candidates
    assert choice.chosen.token_ids == [3, 4, 5]  # the last wins


def test_vocabularies_are_told_with_what_they_lose_and_gain() -> None:
    tree = Candidate(TreeSettings(4, 1, 4, 0.5), tau=4.0, cycle_seconds=0.1)
    result = make_result(tree, {"best": 12.0, "default": 11.0, "plain": 30.0})
    assert "draft vocabulary: as before, nothing else was measured" in describe(result)
    assert "draft_vocabulary" not in result.settings
    whole, given = make_candidate(4096, 4.0, 0.1, "all"), make_candidate(3000, 3.0, 0.09, "given")
    counted, least = make_candidate(1024, 3.9, 0.08), make_candidate(512, 2.0, 0.075)
    candidates = [whole, given, counted, least]
    for measured, plain, words, token_ids in (
        ({}, None, "all 4096 tokens; fewer are not expected to be faster", None),
        ({whole: 40.0, counted: 39.0}, 31.0, "all 4096 tokens, measured to be fastest", None),
        (
            {whole: 40.0, given: 30.0, counted: 42.0}, 31.0,
            "1024 of 4096 tokens: tau -2.5%, time of a cycle -20.0%, speed +5.0% measured", list(range(1024)),
        ),
        (
            {whole: 40.0, given: 44.0}, 45.0,
            "3000 of 4096 tokens (the drafter's): tau -25.0%, time of a cycle -10.0%, speed +10.0% measured",
            list(range(3000)),
        ),
    ):  # fmt: skip
        # Half as fast while cycles were timed.
        choice = VocabularyChoice(candidates, measured, plain, step_seconds=2 / (plain or 1))
        speed_up = 1 if plain is None else 2
        result = make_result(tree, {"best": 12.0, "default": 11.0, "plain": 30.0}, choice)
        assert result.settings == tree.settings.as_dict() | {"draft_vocabulary": token_ids, "cycle_costs": None}
        # The last contest is the one that counts.
        assert result.speculation_pays == (plain == 31.0)
        text = describe(result)
        assert f"\nbest draft vocabulary: {words}\n" in text + "\n"
        assert f"\n   4096   4.00      0.00    100.00  {40 * speed_up:8.1f}" in text
        assert f"\n    512   2.00      2.00     75.00  {2 / 0.075 * speed_up:8.1f}\n" in text
    assert "\n   3000   3.00      1.00     90.00      66.7      44.0  (the drafter's)\n" in text


def test_winner_is_written_as_a_list_and_decodes_exactly(
    tmp_path: Path, contests: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "SMALLEST_VOCABULARY", 1024)
    monkeypatch.setattr(
        vocabulary, "measure_cycles", lambda *args, **_: ({size: float(size) for size in args[3]}, 1.0)
    )
    monkeypatch.setattr(finding, "BRANCHING_FACTORS", (1,))
    monkeypatch.setattr(finding, "DRAFT_TEMPERATURES", ())
    folder = shutil.copytree(DEMO_TARGET.parent / "gumiho", tmp_path / "gumiho")
    options: dict[str, Any] = {
        "num_prompts": 2, "max_new_tokens": 8, "max_tree_size": 2, "repeats": 1, "dtype": "float32",
        "tune_sizes": False, "prompts": str(DEMO_TARGET.parent / "prompts.jsonl"),
    }  # fmt: skip
    result = tune(TuningArguments(str(DEMO_TARGET), str(folder), **options))
    token_ids = json.loads((folder / "generation_config.json").read_text())["draft_vocabulary"]
    assert token_ids == result.vocabulary.chosen.token_ids
    assert len(set(token_ids)) == 1024
    assert [len(set(token_ids) & set(part)) < 1024 for part in result.vocabulary.chosen.of_prompts] == [True] * 2
    target = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    drafter = GumihoModel.from_pretrained(folder, dtype=torch.float32)
    assert drafter.generation_config.draft_vocabulary == token_ids
    ids = torch.tensor([[5, 6, 7]])
    plain = target.generate(ids, max_new_tokens=40, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=40, do_sample=False, assistant_model=drafter), plain)
    # Where there was nothing to choose, the drafter keeps what it has.
    monkeypatch.setattr(command, "find_best_tree", lambda *_: replace(result, vocabulary=None))
    tune(TuningArguments(str(DEMO_TARGET), str(folder), **options))
    assert json.loads((folder / "generation_config.json").read_text())["draft_vocabulary"] == token_ids
