"""Observers see what generations do, each only those it was meant for."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from targets import make_drafter, make_prompts, make_target
from transformers import DynamicCache, PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.observers import GenerationEvents, GenerationObserver, Stage, observing
from transformers_gumiho.generation.tree.draft_tree import DraftTree
from transformers_gumiho.generation.tree.walk import Path
from transformers_gumiho.internals import CACHE_NAME
from transformers_gumiho.tools.measuring.timing import StageTimer


STATIC = {"cache_implementation": "static", "disable_compile": True}


class Recorder(GenerationObserver):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.batch_sizes: list[int] = []
        self.cycles: list[tuple[DraftTree, Path]] = []

    def on_generation_begin(self, batch_size: int) -> None:
        self.batch_sizes.append(batch_size)

    def on_stage_begin(self, stage: Stage) -> None:
        self.events.append(stage)

    def on_stage_end(self, stage: Stage) -> None:
        self.events.append(f"/{stage}")

    def on_cycle(self, tree: DraftTree, path: Path) -> None:
        self.events.append("cycle")
        self.cycles.append((tree, path))

    def committed(self, row: int) -> list[int]:
        """The tokens that the cycles have added to a row."""
        return [token for _, path in self.cycles for token in path.tokens[row, : path.accepted_lengths[row]].tolist()]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target()


@pytest.fixture(scope="module")
def drafter(target: PreTrainedModel) -> GumihoModel:
    return make_drafter(target, num_assistant_tokens=15)


@pytest.fixture(scope="module")
def generate(target: PreTrainedModel, drafter: GumihoModel) -> Callable[..., Any]:
    """Decodes 17 tokens after prompts of these lengths."""

    def generate(*lengths: int, **settings: Any) -> Any:
        options = {"assistant_model": drafter, "max_new_tokens": 17, "do_sample": False} | settings
        return target.generate(**make_prompts(list(lengths), seed=sum(lengths)), **options)

    return generate


@pytest.mark.parametrize("settings", [{}, STATIC, {"do_sample": True}], ids=["greedy", "fixed shapes", "sampling"])
@pytest.mark.parametrize("lengths", [(5,), (4, 7, 2)])
def test_cycles_report_what_is_committed(
    generate: Callable[..., Any], lengths: tuple[int, ...], settings: dict[str, Any]
) -> None:
    recorder = Recorder()
    with observing(recorder):
        texts = generate(*lengths, **settings)
    assert recorder.batch_sizes == [len(lengths)]
    prompt_length = max(lengths)
    for row, text in enumerate(texts.tolist()):
        assert recorder.committed(row) == text[prompt_length + 1 :], "all but the first token come from cycles"
    newest = [prompt_length] * len(lengths)
    for tree, path in recorder.cycles:
        for row, count in enumerate(path.accepted_lengths):
            if not count:
                continue
            assert tree.tokens[row, 0] == texts[row, newest[row]], "a tree grows from the newest token"
            nodes, tokens = path.nodes[row, :count], path.tokens[row, :count]
            assert nodes[0] == 0
            assert tree.parents[row, nodes[1:]].tolist() == nodes[:-1].tolist()
            assert tree.tokens[row, nodes[1:]].tolist() == tokens[:-1].tolist()
            newest[row] += count


def test_stages_come_in_their_order(generate: Callable[..., Any]) -> None:
    recorder = Recorder()
    with observing(recorder):
        generate(5)
    without_passes = [event for event in recorder.events if not event.endswith("drafter_pass")]
    cycle = ["draft", "/draft", "verify", "/verify", "cycle"]
    assert without_passes == ["prompt", "/prompt", *cycle * len(recorder.cycles)]
    is_drafting = False
    for event in recorder.events:
        is_drafting = event == "draft" or (is_drafting and event != "/draft")
        assert is_drafting or not event.endswith("drafter_pass")


def test_threads_see_only_their_own(generate: Callable[..., Any]) -> None:
    both_observe, both_are_done = Barrier(3, timeout=60), Barrier(3, timeout=60)

    def decode(length: int) -> tuple[Recorder, torch.Tensor]:
        recorder = Recorder()
        with observing(recorder):
            both_observe.wait()
            text = generate(length)
            both_are_done.wait()
        return recorder, text

    of_main = Recorder()
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(decode, length) for length in (3, 8)]
        with observing(of_main):
            both_observe.wait()
            both_are_done.wait()
    for length, result in zip((3, 8), results, strict=True):
        recorder, text = result.result()
        assert recorder.batch_sizes == [1]
        assert recorder.committed(0) == text[0, length + 1 :].tolist()
    assert not of_main.batch_sizes


def test_observers_leave_in_any_order(generate: Callable[..., Any]) -> None:
    first, second = Recorder(), Recorder()
    of_first, of_second = observing(first), observing(second)
    of_first.__enter__()
    of_second.__enter__()
    generate(3)
    of_first.__exit__(None, None, None)
    generate(4)
    with ThreadPoolExecutor(1) as pool:  # also from another thread
        pool.submit(of_second.__exit__, None, None, None).result()
    generate(5)
    assert len(first.batch_sizes) == 1
    assert len(second.batch_sizes) == 2


def test_a_target_is_observed_in_all_threads(
    target: PreTrainedModel, drafter: GumihoModel, generate: Callable[..., Any]
) -> None:
    of_target, of_another = Recorder(), Recorder()
    with observing(of_target, target), observing(of_another, make_target()), ThreadPoolExecutor(1) as pool:
        text = pool.submit(generate, 3).result()
        generate(4)
    generate(5)
    assert of_target.batch_sizes == [1, 1]
    assert of_target.committed(0)[: text.shape[1] - 4] == text[0, 4:].tolist()
    assert not of_another.batch_sizes


@pytest.mark.parametrize("name", [name for name in vars(GenerationObserver) if name.startswith("on_")])
def test_an_observer_that_fails_ends_the_generation_and_nothing_else(generate: Callable[..., Any], name: str) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("observer failed")

    before, failing = Recorder(), type("Failing", (GenerationObserver,), {name: fail})()
    with observing(before):
        with pytest.raises(RuntimeError, match="observer failed"), observing(failing):
            generate(3)
        begun = [event for event in before.events if event.removeprefix("/") in ("prompt", "draft", "verify")]
        assert all(begun.count(stage) == begun.count(f"/{stage}") for stage in ("prompt", "draft", "verify"))
        text = generate(3)
    assert before.batch_sizes == [1, 1]
    assert torch.equal(generate(3), text)


def test_without_observers_nothing_is_reported(generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with observing(Recorder()):
        told = generate(3)
    monkeypatch.setattr(GenerationEvents, "_report_stage", lambda *_: pytest.fail("a stage is reported"))
    assert torch.equal(generate(3), told)


@pytest.mark.parametrize("settings", [{}, STATIC], ids=["growing", "fixed shapes"])
def test_stages_of_a_cycle_are_timed(generate: Callable[..., Any], settings: dict[str, Any]) -> None:
    recorder = Recorder()
    with observing(timer := StageTimer([], with_stages=True)), observing(recorder):
        generate(5, **settings)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(generate, 6).result()
    timer.end = timer.now()
    assert timer.num_cycles == len(recorder.cycles)
    assert min(timer.stages().values()) > 0


@pytest.mark.parametrize("stage", ["prompt", "draft", "verify"])
def test_an_observer_that_raises_leaves_the_callers_cache_intact(
    target: PreTrainedModel, drafter: GumihoModel, stage: Stage
) -> None:
    class Raising(GenerationObserver):
        def on_stage_end(self, ended: Stage) -> None:
            if ended == stage:
                raise KeyError(stage)

    prompt, cache = make_prompts([5]), DynamicCache(config=target.config)
    with pytest.raises(KeyError, match=stage), observing(Raising()):
        target.generate(**prompt, assistant_model=drafter, **{CACHE_NAME: cache}, max_new_tokens=9, do_sample=False)
    plain = DynamicCache(config=target.config)
    target(**prompt, **{CACHE_NAME: plain})
    assert cache.get_seq_length() == 5
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)
