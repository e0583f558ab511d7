"""User code that draws random numbers between two tokens runs where plain decoding runs it: same seed, same text."""

from typing import Any

import pytest
import torch
from targets import Pair, equals_plain, make_pair, make_prompts
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair(num_assistant_tokens=47)


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


def check(pair: Pair, code: str, lengths: list[int], seed: int, **kwargs: Any) -> None:
    """Asserts that text, numbers that the streamer draws, and the generator's state are those of plain decoding."""
    arguments = CODE[code]()
    equals_plain(*pair, seed, **make_prompts(lengths, seed), max_new_tokens=24, **kwargs, **arguments)
    if "streamer" in arguments:
        drawn = arguments["streamer"].drawn
        assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :]


@pytest.mark.parametrize("code", CODE)
def test_one_sequence_samples_the_text_of_its_seed(pair: Pair, code: str) -> None:
    for seed in range(4):
        check(pair, code, [3 + seed], seed, do_sample=True)


@pytest.mark.parametrize("code", ["processor", "criterion", "all"])
def test_rows_that_take_the_same_steps_sample_the_text_of_their_seed(pair: Pair, code: str) -> None:
    for seed in range(4):
        check(pair, code, [5, 2, 4], seed, do_sample=True, eos_token_id=7)


@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
def test_greedy_scores_with_random_noise(pair: Pair, lengths: list[int]) -> None:
    for seed in range(4):
        check(pair, "all", lengths, seed, eos_token_id=7)
