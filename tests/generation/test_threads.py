"""Generations in several threads, on the same target and drafter at once, do not meet."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from targets import make_drafter, make_prompts, make_target
from transformers import PreTrainedModel

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
