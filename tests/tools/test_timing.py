"""Timing decoding: the prompt is left out, and everything after it counts."""

from typing import Any

import pytest
from targets import make_drafter, make_prompts, make_target
from transformers import LlamaForCausalLM

from transformers_gumiho.measuring import timing
from transformers_gumiho.measuring.timing import time_drafted, time_plain


def test_time_of_plain_decoding_is_that_of_the_steps_after_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    target, forward, passes, now = make_target(), LlamaForCausalLM.forward, [], [0.0]

    def timed_forward(self: LlamaForCausalLM, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append(input_ids.shape[1])
        now[0] += 1.0 if input_ids.shape[1] > 1 else 0.02
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", timed_forward)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    taken = time_plain(target, make_prompts([6])["input_ids"], max_new_tokens=11, do_sample=False)
    assert passes == [6] + [1] * 10
    assert (taken.num_tokens, taken.seconds) == (10, pytest.approx(0.2))


def test_time_with_a_drafter_is_that_of_its_cycles() -> None:
    target = make_target()
    settings = {"num_assistant_tokens": 5, "branching_factor": 2, "tree_depth": 5, "draft_temperature": [0.5, 1.0]}
    ids = make_prompts([6])["input_ids"]
    taken = time_drafted(target, make_drafter(target), ids, settings, split=True, max_new_tokens=20, do_sample=False)
    assert taken.num_tokens == 19
    assert 19 / 6 <= taken.num_cycles <= 19
    assert 0 < taken.verify_seconds < taken.cycle_seconds
    # The last cycle drafts nothing after it.
    assert taken.num_cycles * taken.verify_seconds < taken.seconds
    assert (taken.num_cycles - 1) * taken.cycle_seconds < taken.seconds
    plain = time_plain(target, ids, max_new_tokens=20, do_sample=False)
    assert plain.sequences.equal(taken.sequences)
