"""Timing decoding: the prompt is left out, and everything after it counts."""

import functools
from typing import Any

import pytest
from targets import make_drafter, make_prompts, make_target
from transformers import LlamaForCausalLM

from transformers_gumiho import GumihoCandidateGenerator
from transformers_gumiho.generation.observers import observing
from transformers_gumiho.tools.measuring import timing
from transformers_gumiho.tools.measuring.timing import (
    DecodingMode,
    DecodingTime,
    Runner,
    StageTimer,
    temporary_settings,
    time_decoding,
)
from transformers_gumiho.tools.tuning.contest import compare


def test_time_of_plain_decoding_is_that_of_the_steps_after_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    target, forward, passes, now = make_target(), LlamaForCausalLM.forward, [], [0.0]

    def timed_forward(self: LlamaForCausalLM, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append(input_ids.shape[1])
        now[0] += 1.0 if input_ids.shape[1] > 1 else 0.02
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", timed_forward)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    taken = time_decoding(target, make_prompts([6]), max_new_tokens=11, do_sample=False)
    assert passes == [6] + [1] * 10
    assert (taken.num_tokens, taken.seconds) == (10, pytest.approx(0.2))


def test_time_with_a_drafter_is_that_of_its_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the stages are a part, and reading the prompt is none."""
    target, passes = make_target(), []
    target.model.register_forward_pre_hook(lambda *_: passes.append(1))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 0.02 * len(passes))
    settings = {"num_assistant_tokens": 5, "branching_factor": 2, "tree_depth": 5, "draft_temperature": [0.5, 1.0]}
    inputs, length = make_prompts([6]), {"max_new_tokens": 19, "do_sample": False}
    drafter = make_drafter(target)
    taken = time_decoding(target, inputs, settings=settings, assistant_model=drafter, **length)
    assert taken.num_tokens == 18
    assert 18 / 6 <= taken.num_passes <= 18
    assert taken.seconds == pytest.approx(0.02 * taken.num_passes)
    assert time_decoding(target, inputs, **length).answers == taken.answers
    with temporary_settings(drafter, settings), observing(timer := StageTimer([], with_stages=True)):
        target.generate(**inputs, assistant_model=drafter, **length)
    timer.end = timer.now()
    stages = timer.stages()
    assert stages["num_cycles"] == taken.num_passes
    assert stages["verify"] == pytest.approx(0.02 * taken.num_passes)
    assert timer.end - timer.start == pytest.approx(stages["prompt"] + stages["verify"])


def test_the_time_of_a_cycle_is_that_of_cycles_that_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one token missing, nothing is drafted: the last cycle is a step of plain decoding."""
    target, now = make_target(), [0.0]
    drafter = make_drafter(target, num_assistant_tokens=5, branching_factor=1, tree_depth=5)
    draft, forward = GumihoCandidateGenerator.draft, LlamaForCausalLM.forward

    def timed_draft(self: Any, committed: Any) -> Any:
        now[0] += 0.03
        return draft(self, committed)

    @functools.wraps(forward)  # its parameters say what can be verified
    def timed_forward(*args: Any, **kwargs: Any) -> Any:
        now[0] += 0.02
        return forward(*args, **kwargs)

    monkeypatch.setattr(GumihoCandidateGenerator, "draft", timed_draft)
    monkeypatch.setattr(LlamaForCausalLM, "forward", timed_forward)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    ended = 0
    for length in range(8, 16):
        settings = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None}
        drafted = time_decoding(target, make_prompts([6]), assistant_model=drafter, **settings)
        plain = time_decoding(target, make_prompts([6]), **settings)
        ended += drafted.num_tokens < plain.num_tokens
        assert compare([(drafted, plain)]).break_even == pytest.approx(0.05 / 0.02)
    assert 0 < ended < 8


def test_modes_take_turns_in_coming_first_once_they_are_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []

    def time_decoding(target: Any, inputs: Any, *, settings: dict[str, str], **kwargs: Any) -> DecodingTime:
        decoded.append(settings["name"])
        return DecodingTime(float(len(decoded)), 1, 1)

    monkeypatch.setattr(timing, "time_decoding", time_decoding)
    compared = [DecodingMode(name, settings={"name": name}) for name in "abc"]
    runner = Runner(make_target(), 0, max_new_tokens=4)
    taken = [runner.compare(compared, [[5, 6]], 0.0, seed=0) for _ in range(2)]
    assert "".join(decoded) == "abc" + "abc" + "bca"
    assert [[time.seconds for time in times] for times in taken] == [[4, 5, 6], [9, 7, 8]], "in the order of the modes"
    runner.compare(compared[:1], [[5], [6]], 0.0, seed=0)
    assert "".join(decoded[9:]) == "aa", "warmed up for another batch size"
