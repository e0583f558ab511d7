"""User code that draws random numbers between two tokens runs where plain decoding runs it: same seed, same text."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from targets import make_drafter, make_prompts, make_target
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from transformers_gumiho import GumihoModel


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target()


@pytest.fixture(scope="module")
def drafter(target: PreTrainedModel) -> GumihoModel:
    return make_drafter(target, num_assistant_tokens=47)


class DrawingStreamer(BaseStreamer):
    """Draws as many numbers as the newest token says, and records what it draws after each token."""

    def __init__(self) -> None:
        self.drawn: list[tuple[list[int], float]] = []

    def put(self, value: torch.Tensor) -> None:
        self.drawn.append((value.tolist(), float(torch.rand(1 + int(value.flatten()[-1])).sum())))

    def end(self) -> None:
        pass


class DrawingProcessor(LogitsProcessor):
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores + 0.5 * torch.rand(scores.shape[1])


class DrawingCriterion(StoppingCriteria):
    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        return torch.rand(input_ids.shape[0]) < 0.02


CODE = {
    "streamer": lambda: {"streamer": DrawingStreamer()},
    "processor": lambda: {"logits_processor": [DrawingProcessor()]},
    "criterion": lambda: {"stopping_criteria": [DrawingCriterion()]},
    "all": lambda: CODE["streamer"]() | CODE["processor"]() | CODE["criterion"](),
}


def texts_of(
    target: PreTrainedModel, drafter: GumihoModel, code: str, lengths: Sequence[int], seed: int, **kwargs: Any
) -> list[Any]:
    """Returns, plainly and drafted: the text, what the streamer drew, and where the random numbers are left."""
    results = []
    for assistant in ({}, {"assistant_model": drafter}):
        arguments = CODE[code]()
        torch.manual_seed(seed)
        text = target.generate(
            **make_prompts(list(lengths), seed), max_new_tokens=24, **kwargs, **arguments, **assistant
        ).tolist()
        drawn = arguments["streamer"].drawn if "streamer" in arguments else None
        results.append((text, drawn, torch.get_rng_state().tolist()))
    return results


@pytest.mark.parametrize("code", CODE)
def test_one_sequence_samples_the_text_of_its_seed(target: PreTrainedModel, drafter: GumihoModel, code: str) -> None:
    pairs = [texts_of(target, drafter, code, [3 + seed % 4], seed, do_sample=True) for seed in range(12)]
    assert sum(plain == drafted for plain, drafted in pairs) == 12


@pytest.mark.parametrize("code", ["processor", "criterion", "all"])
def test_rows_that_take_the_same_steps_sample_the_text_of_their_seed(
    target: PreTrainedModel, drafter: GumihoModel, code: str
) -> None:
    for seed in range(4):
        plain, drafted = texts_of(target, drafter, code, [5, 2, 4], seed, do_sample=True, eos_token_id=7)
        assert plain == drafted


@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
def test_greedy_scores_with_random_noise(target: PreTrainedModel, drafter: GumihoModel, lengths: list[int]) -> None:
    for seed in range(4):
        plain, drafted = texts_of(target, drafter, "all", lengths, seed, do_sample=False, eos_token_id=7)
        assert plain == drafted
