"""Generations in several threads, on the same target and drafter at once, do not meet."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from targets import make_drafter, make_prompts, make_target
from transformers import PreTrainedModel, TextIteratorStreamer

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.verification.target_states import keep_states
from transformers_gumiho.internals import num_hooks


PROMPTS = [make_prompts(lengths, seed=seed) for seed, lengths in enumerate(([3], [5], [9, 4], [1, 7, 2]))]


@pytest.fixture
def target() -> PreTrainedModel:
    return make_target("gemma3")


@pytest.fixture
def drafter(target: PreTrainedModel) -> GumihoModel:
    return make_drafter(target, num_assistant_tokens=31)


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Threads take turns every few operations."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=repr)
def test_threads_share_both_models(target: PreTrainedModel, drafter: GumihoModel, settings: dict[str, Any]) -> None:
    settings = {"max_new_tokens": 32, "do_sample": False, **settings}
    plain = [target.generate(**prompts, **settings) for prompts in PROMPTS]
    hooks = [num_hooks(module) for module in target.modules()]
    # Plain decoding in the same threads is another user of the target. It shares its static cache among threads.
    assistants = [drafter] if settings.get("cache_implementation") else [drafter, None, drafter]
    work = [(index, assistant) for assistant in assistants for index in range(len(PROMPTS))]
    with ThreadPoolExecutor(max_workers=4) as pool:
        texts = list(
            pool.map(lambda item: target.generate(**PROMPTS[item[0]], **settings, assistant_model=item[1]), work)
        )
    for (index, _), text in zip(work, texts, strict=True):
        assert torch.equal(text, plain[index])
    assert [num_hooks(module) for module in target.modules()] == hooks


def test_another_thread_takes_its_hook_away_during_a_pass(target: PreTrainedModel, drafter: GumihoModel) -> None:
    """PyTorch goes on to call that hook, so that a pass is told twice."""
    settings = {"max_new_tokens": 16, "do_sample": False}
    plain = target.generate(**PROMPTS[0], **settings)
    decoder = target.get_decoder()
    handles = [decoder.register_forward_hook(lambda *_: handles[1].remove())]
    handles.append(decoder.register_forward_hook(keep_states))
    assert torch.equal(target.generate(**PROMPTS[0], **settings, assistant_model=drafter), plain)
    handles[0].remove()


class Words:
    """Stands in for a tokenizer: each id is a word."""

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return "".join(f"{int(token)} " for token in token_ids)


def test_streamers_of_generations_in_the_background(target: PreTrainedModel, drafter: GumihoModel) -> None:
    single = [make_prompts([length], seed=length) for length in (4, 6, 9)]
    settings = {"max_new_tokens": 32, "do_sample": False}
    plain = [target.generate(**prompt, **settings)[0, prompt["input_ids"].shape[1] :] for prompt in single]
    streamers = [TextIteratorStreamer(Words(), skip_prompt=True, timeout=60) for _ in single]
    with ThreadPoolExecutor(max_workers=len(single)) as pool:
        texts = [
            pool.submit(target.generate, **prompt, **settings, assistant_model=drafter, streamer=streamer)
            for prompt, streamer in zip(single, streamers, strict=True)
        ]
        pieces = [list(streamer) for streamer in streamers]
        for text in texts:
            text.result()
    for expected, received in zip(plain, pieces, strict=True):
        assert "".join(received) == Words().decode(expected.tolist())
        assert len(received) > 4, "the text came in pieces"
