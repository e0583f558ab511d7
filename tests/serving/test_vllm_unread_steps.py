"""Steps without drafts, which the drafter reads later, several in one pass: it then drafts what it would have."""

from collections.abc import Iterator
from typing import Any

import pytest
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

from transformers_gumiho.vllm.unread_steps import MOST_STEPS, UnreadSteps


# One or two requests draft, more do not.
SCHEDULE = [[1, 2, 7], [3, 8, 0]]
PROMPTS = demo_prompts()[:8]
Chains = list[list[list[int]]]


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    # A cache for fewer tokens than eight requests write: some are put off in the middle, and go on later.
    config = drafting_with(DEMO_DRAFTER, 7, num_speculative_tokens_per_batch_size=SCHEDULE)
    with engine(DEMO_TARGET, config, num_gpu_blocks_override=14) as llm:
        yield llm


def write_until_few_are_left(llm: Any) -> None:
    write_texts(llm, PROMPTS[:4], [9, 20, 31, 60])


def write_while_others_come(llm: Any) -> None:
    """In between a prompt comes that is read in pieces, and a request is aborted."""
    engine, long_prompt = llm.llm_engine, "".join(demo_prompts()[24:28])[:400]
    for name, prompt in zip("abcd", PROMPTS, strict=False):
        engine.add_request(f"early-{name}", prompt[:40], SamplingParams(temperature=0.0, max_tokens=50))
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
    write_texts(llm, [prompt[:24] for prompt in PROMPTS], [40, 42, 44, 46, 48, 50, 60, 70])
    assert metric(llm, "num_preemptions") > before


def go_on_after_cached_texts(llm: Any) -> None:
    """The cached blocks hold tokens that had not been read when their request ended."""
    outputs = llm.generate(PROMPTS[:3], SamplingParams(temperature=0.0, max_tokens=45, ignore_eos=True), use_tqdm=False)
    tokens = [*outputs[0].prompt_token_ids, *outputs[0].outputs[0].token_ids]
    settings = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": tokens}], settings, use_tqdm=False)
    assert output.num_cached_tokens > len(outputs[0].prompt_token_ids) + MOST_STEPS


WAYS = [write_until_few_are_left, write_while_others_come, write_more_than_fits, go_on_after_cached_texts]


@pytest.mark.parametrize("write", WAYS, ids=lambda write: write.__name__)
def test_drafts_are_those_of_a_drafter_that_reads_every_step(
    write: Any, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_of(llm)

    def draft() -> tuple[Chains, int]:
        """Returns the chains of all steps, and the number of the drafter's passes."""
        llm.reset_prefix_cache()
        passes: list[None] = []
        hook = drafter.model.register_forward_pre_hook(lambda *_: passes.append(None))
        with recorded_chains(llm) as steps:
            write(llm)
        hook.remove()
        return steps, len(passes)

    chains, num_passes = draft()
    with monkeypatch.context() as patch:
        patch.setattr(drafter, "_may_read_later", False)
        expected, num_passes_of_every_step = draft()
    assert chains == expected
    assert {len(drafted[0]) for drafted in chains} == {0, 7}
    without_drafts = sum(not drafted[0] for drafted in chains)
    assert num_passes_of_every_step - num_passes > without_drafts / 2
    # And it needs what it has read.
    with monkeypatch.context() as patch:
        patch.setattr(UnreadSteps, "add", lambda *_: None)
        assert draft()[0] != expected


def test_passes_hold_no_more_steps_and_tokens_than_they_may(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    take = UnreadSteps.take

    def recording(self: UnreadSteps) -> dict[str, Any]:
        arguments = take(self)
        metadata = arguments["common_attn_metadata"]
        sizes.append((metadata.max_query_len, metadata.num_actual_tokens))
        return arguments

    monkeypatch.setattr(UnreadSteps, "take", recording)
    for most_tokens, num_steps in ((64, MOST_STEPS), (20, 5)):
        drafter_of(llm)._unread = UnreadSteps(most_tokens)
        sizes.clear()
        write_texts(llm, PROMPTS[:4], 30)
        assert max(sizes) == (num_steps, 4 * num_steps)
