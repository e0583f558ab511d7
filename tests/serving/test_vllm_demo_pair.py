"""The demo pair in vLLM: the texts of vLLM without a drafter, from the chains that transformers drafts."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams
from vllm_engine import (
    DEMO_DRAFTER,
    DEMO_TARGET,
    acceptance_length,
    demo_prompts,
    drafter_of,
    drafting_with,
    engine,
    metric,
    recorded_chains,
    write_texts,
)
from vllm_pairs import transformers_chains

from transformers_gumiho import GumihoConfig, GumihoModel


NUM_TOKENS = 24
PROMPTS = demo_prompts()[:16]
# All of them begin at once, and then outgrow the cache.
SHORT_PROMPTS = [prompt[:24] for prompt in PROMPTS[:8]]
# Longer than a step of the engine takes, and than a block of its cache.
LONG_PROMPT = "".join(demo_prompts()[24:28])[:500]


@pytest.fixture(scope="module")
def plain_texts() -> list[list[int]]:
    """The texts of vLLM without a drafter."""
    with engine(DEMO_TARGET) as llm:
        return write_texts(llm, [*PROMPTS, LONG_PROMPT], NUM_TOKENS) + write_texts(llm, SHORT_PROMPTS, 2 * NUM_TOKENS)


@pytest.fixture(scope="module")
def llm(plain_texts: list[list[int]]) -> Iterator[Any]:
    # A cache for fewer tokens than eight requests write: some are put off in the middle, and go on later.
    settings = {"num_gpu_blocks_override": 14, "per_request_spec_decode_metrics": "summary"}
    with engine(DEMO_TARGET, drafting_with(DEMO_DRAFTER, 7), **settings) as llm:
        yield llm


def test_texts_are_those_without_a_drafter(llm: Any, plain_texts: list[list[int]]) -> None:
    assert type(drafter_of(llm)).__name__ == "GumihoProposer"
    assert write_texts(llm, PROMPTS, NUM_TOKENS) == plain_texts[: len(PROMPTS)]
    # The serial head alone would not come so far.
    assert acceptance_length(llm) > 3
    assert all(count > 0 for count in metric(llm, "spec_decode_num_accepted_tokens_per_pos"))


def test_each_request_counts_its_accepted_drafts(llm: Any) -> None:
    before = metric(llm, "spec_decode_num_accepted_tokens")
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0), use_tqdm=False)
    steps = [output.outputs[0].spec_decode_metrics.histogram for output in outputs]
    accepted = [sum(length * count for length, count in enumerate(counts)) for counts in steps]
    assert all(count > 0 for count in accepted)
    assert sum(accepted) == metric(llm, "spec_decode_num_accepted_tokens") - before


def test_prompts_in_pieces_and_cached_prefixes_change_nothing(llm: Any, plain_texts: list[list[int]]) -> None:
    for _ in range(2):
        (output,) = llm.generate(
            [LONG_PROMPT], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False
        )
        assert len(output.prompt_token_ids) > 100
        assert list(output.outputs[0].token_ids) == plain_texts[len(PROMPTS)]
    assert output.num_cached_tokens >= 64


def test_requests_that_are_put_off_in_the_middle_go_on(llm: Any, plain_texts: list[list[int]]) -> None:
    before = metric(llm, "num_preemptions")
    assert write_texts(llm, SHORT_PROMPTS, 2 * NUM_TOKENS) == plain_texts[-len(SHORT_PROMPTS) :]
    assert metric(llm, "num_preemptions") > before


def test_requests_that_are_aborted_leave_the_others_alone(llm: Any, plain_texts: list[list[int]]) -> None:
    settings = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    # Those of `LLM` have numbers of their own, which the engine goes on counting.
    for index, prompt in enumerate(PROMPTS[:6]):
        llm.llm_engine.add_request(f"aborted-{index}", prompt, settings)
    done: dict[str, list[int]] = {}
    for step in range(200):
        if step == 4:
            llm.llm_engine.abort_request(["aborted-0", "aborted-3"])
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        if not llm.llm_engine.has_unfinished_requests():
            break
    kept = {f"aborted-{index}": plain_texts[index] for index in (1, 2, 4, 5)}
    assert {name: tokens for name, tokens in done.items() if name in kept} == kept


def test_chains_are_those_of_transformers(llm: Any) -> None:
    target = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    gumiho = GumihoModel.from_pretrained(DEMO_DRAFTER, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS[:3]]
    expected = transformers_chains(target, gumiho, prompts, 7, NUM_TOKENS)
    for prompt, drafted in zip(prompts, expected, strict=True):
        with recorded_chains(llm) as steps:
            write_texts(llm, [prompt], NUM_TOKENS)
        chains = [chains[0] for chains in steps]
        # vLLM drafts after each piece of a prompt, and also after the step that was the last.
        start = chains.index(drafted[0])
        assert chains[start : start + len(drafted)] == drafted
        assert len(drafted) > 3


def test_the_auto_classes_give_what_they_give_without_vllm(llm: Any) -> None:
    assert type(AutoConfig.from_pretrained(DEMO_DRAFTER)) is GumihoConfig
    assert type(AutoModel.from_pretrained(DEMO_DRAFTER)) is GumihoModel


def test_more_tokens_than_were_trained_are_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    shutil.copytree(DEMO_TARGET, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    with (
        pytest.raises(ValueError, match=r"`num_speculative_tokens` is 8.*at most 7 tokens: 2 serial ones"),
        engine(tmp_path / "target", drafting_with(DEMO_DRAFTER, 8)),
    ):
        pass


def test_how_much_is_drafted_follows_the_number_of_requests(plain_texts: list[list[int]]) -> None:
    schedule = [[1, 1, 7], [2, 3, 2], [4, 4, 1], [5, 8, 0]]
    config = drafting_with(DEMO_DRAFTER, 7, num_speculative_tokens_per_batch_size=schedule)
    runs: list[list[list[list[int]]]] = []
    with engine(DEMO_TARGET, config) as llm:
        for num_requests in (1, 3, 4, 8, 1):
            with recorded_chains(llm) as steps:
                assert write_texts(llm, PROMPTS[:num_requests], NUM_TOKENS) == plain_texts[:num_requests]
            runs.append(steps)
    lengths = {(len(chains), len(chains[0])) for steps in runs for chains in steps}
    # The cache is too small for eight requests at once, so their number changes on the way.
    assert {(1, 7), (2, 2), (3, 2), (4, 1), (5, 0)} <= lengths
    assert all(length == (7, 2, 2, 1, 0, 0, 0, 0)[count - 1] for count, length in lengths)
    assert runs[0] == runs[-1]
    assert len(runs[0]) < NUM_TOKENS / 2


def test_a_drafter_that_is_never_right_is_said_once(
    plain_texts: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    GumihoModel(GumihoConfig.from_pretrained(DEMO_DRAFTER)).save_pretrained(tmp_path / "gumiho-random")
    with engine(DEMO_TARGET, drafting_with(tmp_path / "gumiho-random", 2)) as llm:
        for _ in range(2):
            assert write_texts(llm, PROMPTS, NUM_TOKENS) == plain_texts[: len(PROMPTS)]
    (message,) = [message for message in caplog.messages if "drafts, so drafting costs time" in message]
    assert "the drafter was trained for another target" in message


def test_a_drafter_is_no_target() -> None:
    with pytest.raises(ValueError, match="is a Gumiho drafter, which cannot generate text"), engine(DEMO_DRAFTER):
        pass
