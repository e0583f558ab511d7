"""Steps without drafts, which the drafter reads later, several in one pass: it then drafts what it would have."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm_engine import (
    DEMO_DRAFTER,
    DEMO_TARGET,
    demo_prompts,
    drafter_of,
    drafting_with,
    engine,
    metric,
    recorded_chains,
    write_texts,
)

from transformers_gumiho.vllm.unread_steps import MAX_STEPS, UnreadSteps


# One or two requests draft, more do not.
SCHEDULE = [[1, 2, 7], [3, 8, 0]]
PROMPTS = [prompt[:24] for prompt in demo_prompts()[:8]]


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    # A cache for fewer tokens than eight requests write: some are put off in the middle, and go on later.
    config = drafting_with(DEMO_DRAFTER, 7, num_speculative_tokens_per_batch_size=SCHEDULE)
    with engine(DEMO_TARGET, config, num_gpu_blocks_override=14) as llm:
        yield llm


def write_until_few_are_left(llm: Any) -> None:
    write_texts(llm, PROMPTS[:4], [6, 16, 27, 40])


def write_while_others_come(llm: Any) -> None:
    """In between a prompt comes that is read in pieces, and a request is aborted."""
    engine, long_prompt = llm.llm_engine, "".join(demo_prompts()[24:28])[:400]
    for name, prompt in zip("abcd", PROMPTS, strict=False):
        engine.add_request(f"early-{name}", prompt, SamplingParams(temperature=0.0, max_tokens=40))
    for step in range(200):
        if step == 12:
            engine.add_request("late", long_prompt, SamplingParams(temperature=0.0, max_tokens=30))
        if step == 25:
            engine.abort_request(["early-a", "early-c"])
        engine.step()
        if not engine.has_unfinished_requests():
            return
    raise AssertionError("The requests do not end.")


def write_more_than_fits(llm: Any) -> None:
    before = metric(llm, "num_preemptions")
    # Those that came last are put off.
    write_texts(llm, PROMPTS, [60, *range(36, 50, 2)])
    assert metric(llm, "num_preemptions") > before


def go_on_after_a_cached_text(llm: Any) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    (first, *_) = llm.generate(PROMPTS[:3], sampling, use_tqdm=False)
    prompt = {"prompt_token_ids": [*first.prompt_token_ids, *first.outputs[0].token_ids]}
    (second,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    assert second.num_cached_tokens > len(first.prompt_token_ids) + MAX_STEPS


WAYS = [write_until_few_are_left, write_while_others_come, write_more_than_fits, go_on_after_a_cached_text]


def draft(llm: Any, write: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, torch.Tensor, int]:
    """Returns the chains of all steps, the features of their serial tokens, and the number of the drafter's passes."""
    llm.reset_prefix_cache()
    model, passes, features = drafter_of(llm).model, [], []
    draft_in_parallel = model.draft_in_parallel

    def recording(tokens: torch.Tensor, serial_features: torch.Tensor) -> torch.Tensor:
        features.append(serial_features.flatten(0, 1).clone())
        return draft_in_parallel(tokens, serial_features)

    hook = model.register_forward_pre_hook(lambda *_: passes.append(None))
    with monkeypatch.context() as patch, recorded_chains(llm) as steps:
        patch.setattr(model, "draft_in_parallel", recording)
        write(llm)
    hook.remove()
    return steps, torch.cat(features), len(passes)


@pytest.mark.parametrize("write", WAYS, ids=lambda write: write.__name__)
def test_drafts_are_those_of_a_drafter_that_reads_every_step(
    write: Callable[[Any], None], llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains, features, num_passes = draft(llm, write, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(drafter_of(llm), "_may_read_later", False)
        expected, expected_features, num_passes_of_every_step = draft(llm, write, monkeypatch)
    assert chains == expected
    torch.testing.assert_close(features, expected_features, rtol=1e-3, atol=1e-3)
    assert {len(drafted[0]) for drafted in chains} == {0, 7}
    without_drafts = sum(not drafted[0] for drafted in chains)
    assert num_passes_of_every_step - num_passes > without_drafts / 2
    # And the drafter depends on what it has read.
    with monkeypatch.context() as patch:
        patch.setattr(UnreadSteps, "add", lambda *_: None)
        _, features, _ = draft(llm, write, monkeypatch)
    length = min(len(features), len(expected_features))
    assert not torch.allclose(features[:length], expected_features[:length], rtol=0.01, atol=0.01)
