"""Drafts are made under the noise of the draws to come: it is the true noise, and drafts gain by it."""

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from targets import equals_plain, make_drafter, make_pair, make_prompts, make_target
from transformers import MaxLengthCriteria, StopStringCriteria

from transformers_gumiho.generation import token_choice, token_draws
from transformers_gumiho.generation.token_draws import TokenDraws, can_preview_multinomial


WARPERS: list[dict[str, Any]] = [{"top_k": 0}, {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2}]


def draw(scores: torch.Tensor) -> torch.Tensor:
    """Draws tokens `(n, B)` by scores `(n, B, V)` one step after the other, as `generate()` does."""
    return torch.stack([torch.multinomial(step.softmax(dim=-1), 1).squeeze(1) for step in scores])


def draws_after_one(batch_size: int, vocab_size: int, reserve: bool = False) -> TokenDraws:
    """Returns draws that have drawn one token, from which they know the kind of the scores, and have given it back."""
    draws, state = TokenDraws(batch_size, reserve), torch.get_rng_state()
    draws.draw(torch.zeros(batch_size, vocab_size), [0] * batch_size)
    draws.forget([1] * batch_size)
    torch.set_rng_state(state)
    return draws


def variates(draws: TokenDraws, num_draws: int, step: int = 1) -> list[torch.Tensor]:
    """Returns the exponential variates `(2, 11)` of the draws from a step on."""
    return list(draws.take(num_draws, 11, [step] * 2).unbind(1))


def test_noise_that_was_seen_is_not_made_again(calls_of: Any) -> None:
    draws = draws_after_one(1, 11)
    made = calls_of(torch.Tensor, "exponential_")
    first = draws.peek(5, 11, [1])
    for step in (1, 2):
        draws.draw(torch.zeros(1, 11), [step])
    draws.forget([3])
    second = draws.peek(5, 11, [3])
    assert torch.equal(first[:, 2:], second[:, :3])
    assert len(made) == 5 + 2


@pytest.mark.parametrize("others_draw", [False, True])
def test_rows_that_part_are_drawn_with_what_they_were_told(others_draw: bool) -> None:
    """
    Whoever else draws meanwhile: had a row other noise because its drafts took it no further, what it is drawn with
    would depend on the noise. Nobody gets numbers that another one has.
    """
    torch.manual_seed(0)
    plain = [torch.empty(2, 11).exponential_() for _ in range(9)]
    torch.manual_seed(0)
    draws = draws_after_one(2, 11, reserve=True)
    told = variates(draws, 3)
    assert all(map(torch.equal, told, plain))
    seen = [*told, torch.empty(2, 11).exponential_()] if others_draw else told
    for step, exponentials in enumerate(told, start=1):
        tokens = draws.draw(torch.zeros(2, 11), [step] * 2)
        assert torch.equal(tokens, (1 / exponentials).argmax(dim=1, keepdim=True))
    draws.forget([4, 4])
    seen = [*seen, *variates(draws, 3, step=4)]
    draws.draw(torch.zeros(2, 11), [4, 4])
    assert all(map(torch.equal, seen, plain)), "no number twice, none left out"
    draws.return_unused()
    left = len(seen) - 2
    assert torch.equal(torch.empty(2, 11).exponential_(), plain[left]), "what is left is given back"


def test_what_is_left_is_not_given_back_where_others_have_drawn_since() -> None:
    torch.manual_seed(0)
    plain = [torch.empty(2, 11).exponential_() for _ in range(9)]
    torch.manual_seed(0)
    draws = draws_after_one(2, 11, reserve=True)
    variates(draws, 2)
    others = torch.empty(2, 11).exponential_()
    assert torch.equal(others, plain[2])
    variates(draws, 4)
    draws.return_unused()
    assert torch.equal(torch.empty(2, 11).exponential_(), plain[3]), "those after the other's are, and they alone"
    variates(draws, 1)
    torch.rand(1)
    state = torch.get_rng_state()
    draws.return_unused()
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_that_sample_batches_draw_different_numbers() -> None:
    target, drafter = make_pair(seed=3, num_assistant_tokens=16, branching_factor=3)
    texts: list[torch.Tensor] = []
    together = threading.Barrier(2)

    def sample() -> None:
        together.wait()
        texts.append(target.generate(
            **make_prompts([3, 5, 1]), max_new_tokens=40, do_sample=True, top_k=0, assistant_model=drafter
        ))  # fmt: skip

    threads = [threading.Thread(target=sample) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = (text[:, 5:] for text in texts)
    assert (first == second).float().mean() < 0.8, "of 8 tokens two in five are the same by chance"


@settings(deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=8))
def test_noise_that_is_seen_is_that_of_the_next_draws(steps: list[tuple[int, int]]) -> None:
    """The generator is where `torch.multinomial` leaves it, whatever was seen, and whoever else draws."""
    runs = []
    for is_seen in (False, True):
        torch.manual_seed(0)
        draws, drawn = draws_after_one(2, 11), []
        for step, (num_peeked, num_of_others) in enumerate(steps, start=1):
            if is_seen and num_peeked:
                exponentials, state = torch.stack(variates(draws, num_peeked, step)), torch.get_rng_state()
                assert torch.equal((1 / exponentials).argmax(dim=-1), draw(torch.zeros(num_peeked, 2, 11)))
                torch.set_rng_state(state)
            drawn.append(draws.draw(torch.zeros(2, 11), [step] * 2) if is_seen else torch.ones(2, 11).multinomial(1))
            draws.forget([step + 1] * 2)
            drawn.append(torch.randint(99, (2, num_of_others)))
        runs.append((torch.cat([torch.empty(2, 0), *drawn], dim=1), torch.get_rng_state()))
    assert all(map(torch.equal, *runs))


@settings(deadline=None)
@given(rows_that_step=st.lists(st.lists(st.booleans(), min_size=3, max_size=3).filter(any), min_size=1, max_size=12))
def test_each_row_is_drawn_with_the_noise_of_its_own_steps(rows_that_step: list[list[bool]]) -> None:
    probabilities = torch.rand(20, 3, 13, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    torch.manual_seed(1)
    plain = torch.stack([torch.multinomial(step, 1).squeeze(1) for step in probabilities])
    torch.manual_seed(1)
    draws, steps = draws_after_one(3, 13, reserve=True), [0, 0, 0]
    for takes in rows_that_step:
        drawn = [step + 1 for step in steps]
        seen = draws.peek(4, 13, drawn)
        for row, step in enumerate(steps):
            told = probabilities[step : step + 4, row].log() + seen[row]
            assert torch.equal(told.argmax(dim=1), plain[step : step + 4, row])
        tokens = draws.draw(probabilities[steps, range(3)].log(), drawn)
        assert torch.equal(tokens.squeeze(1), plain[steps, range(3)])
        steps = [step + taken for step, taken in zip(steps, takes, strict=True)]
        draws.forget([step + 1 for step in steps])


@pytest.mark.parametrize("lengths", [[5], [5, 2]])
def test_what_is_no_distribution_is_refused_as_in_plain_decoding(lengths: list[int]) -> None:
    def spoil(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if input_ids.shape[1] < 12 else scores.index_fill(0, torch.tensor([len(scores) - 1]), math.nan)

    target = make_target()
    arguments = {**make_prompts(lengths), "max_new_tokens": 20, "do_sample": True, "logits_processor": [spoil]}
    with pytest.raises(RuntimeError) as of_plain:
        target.generate(**arguments)
    with pytest.raises(RuntimeError) as refused:
        target.generate(**arguments, assistant_model=make_drafter(target, num_assistant_tokens=16))
    assert str(refused.value) == str(of_plain.value)


@pytest.mark.parametrize(
    ("max_lead", "warpers"), [(None, WARPERS[0]), (None, WARPERS[1]), (1, WARPERS[0]), (3, WARPERS[1])]
)
def test_batches_sample_the_text_of_the_seed(
    warpers: dict[str, Any], max_lead: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end at different steps, and none is further ahead of the slowest one than noise is kept for."""
    if max_lead is not None:
        monkeypatch.setattr(token_draws, "_KEPT_BYTES", 0)
        monkeypatch.setattr(token_draws, "_MIN_KEPT", max_lead)
    target, drafter = make_pair(seed=3, num_assistant_tokens=16, branching_factor=3)
    ended, parted = set(), 0
    for lengths in ([9, 4, 1], [3] * 6):
        for seed in range(2):
            arguments: dict[str, Any] = {
                **make_prompts(lengths), "max_new_tokens": 60, "do_sample": True, "eos_token_id": [7, 11, 12, 13],
                "pad_token_id": 0, **warpers,
            }  # fmt: skip
            output = equals_plain(target, drafter, seed, **arguments)
            ended |= {sum(row) for row in output.accepted_lengths}
            parted += len({len(row) for row in output.accepted_lengths}) > 1
    assert len(ended) > 8
    assert parted > 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
def test_scores_in_another_precision_sample_the_text_of_the_seed(lengths: list[int], dtype: torch.dtype) -> None:
    """Which is drawn with other random numbers."""
    target = make_target(seed=3)

    def convert(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.to(dtype)

    settings = {**make_prompts(lengths), "do_sample": True, "logits_processor": [convert]}
    equals_plain(target, make_drafter(target), **settings)


def test_a_batch_that_ends_together_draws_as_often_as_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an end-of-sequence token rows go on until a criterion has ended the last one."""

    class EndsAtToken(StopStringCriteria):
        def __init__(self) -> None:
            pass

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return (input_ids[:, -1] % 5 == 0) & (torch.tensor(input_ids.shape[1] > 12))

    monkeypatch.setattr(token_choice, "_ROW_WISE_CRITERIA", {MaxLengthCriteria, EndsAtToken})
    target, drafter = make_pair(seed=3, num_assistant_tokens=16, branching_factor=3)
    target.generation_config.eos_token_id = None
    for seed in range(4):
        arguments = {**make_prompts([9, 4, 1]), "max_new_tokens": 60, "do_sample": True}
        output = equals_plain(target, drafter, seed, **arguments, stopping_criteria=[EndsAtToken()])
        assert output.sequences.shape[1] < 69


def test_no_noise_where_a_generator_cannot_be_copied() -> None:
    assert can_preview_multinomial(torch.device("cpu"))
    assert not can_preview_multinomial(torch.device("meta"))
    draws = TokenDraws(2, reserve=True)
    draws.draw(torch.zeros(2, 4, dtype=torch.float64), [0, 0])
    assert draws.peek(2, 4, [1, 1]) is None


@pytest.mark.parametrize("cache_implementation", [None, "static"])
@pytest.mark.parametrize("lengths", [[3], [3, 5, 1]])
def test_a_drafter_that_agrees_with_the_target_drafts_what_is_drawn(
    lengths: list[int], cache_implementation: str | None
) -> None:
    # A target whose tokens do not depend on the text, and a drafter that knows their distribution (a flat one).
    target = make_target(vocab_size=64)
    drafter = make_drafter(
        target, num_assistant_tokens=7, branching_factor=1, draft_vocabulary=list(range(63, -1, -1))
    )
    head = target.get_output_embeddings()
    head.weight.data.zero_()
    arguments = {
        **make_prompts(lengths), "do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 41,
        "cache_implementation": cache_implementation,
    }  # fmt: skip
    output = equals_plain(target, drafter, **arguments)
    assert len(set(output.sequences[0].tolist())) > 20, "the tokens must be random"
    assert output.accepted_lengths == [[8] * 5] * len(lengths)


def test_rows_that_part_sample_without_bias() -> None:
    # Tokens 1 and 2 at random, after any text; the drafter believes in another share of them. A tree of two nodes is
    # either two first tokens or a path of two, and which of them must not depend on noise that a row may not use.
    target = make_target()
    head = torch.nn.Linear(target.config.hidden_size, target.config.vocab_size).double()
    head.weight.data.zero_()
    head.bias.data.fill_(-1e4)
    head.bias.data[1:3] = 0.0
    target.set_output_embeddings(head)
    drafter = make_drafter(target, num_assistant_tokens=2, branching_factor=2, draft_temperature=1.0)
    arguments = {
        "attention_mask": torch.ones(512, 2, dtype=torch.long), "do_sample": True, "top_k": 0, "max_new_tokens": 3,
        "eos_token_id": 7, "pad_token_id": 0, "sequence_bias": [[[1], math.log(0.7 / 0.3)]],
    }  # fmt: skip
    counts = torch.zeros(2)
    for seed in range(100, 180):
        torch.manual_seed(seed)
        tokens = target.generate(torch.ones(512, 2, dtype=torch.long), assistant_model=drafter, **arguments)
        counts += torch.bincount(tokens[:, -1], minlength=3)[1:3]
    assert counts.sum() == 80 * 512
    assert chisquare(counts.numpy(), counts.sum().item() * np.array([0.7, 0.3])).pvalue > 1e-3
