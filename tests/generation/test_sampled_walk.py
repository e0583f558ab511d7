"""Sampling in one walk, as on accelerators: the text, the records and the generator are those of plain decoding."""

from typing import Any

import pytest
import torch
from streamers import Recorder
from targets import Pair, make_drafter, make_prompts, make_target
from transformers import MaxTimeCriteria, PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation import token_choice, token_draws


EOS = {"eos_token_id": 7}
NUCLEUS = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
RECORDED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
# Lengths of the prompts, and how to generate.
WAYS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "1 row": ([5], {"top_k": 0}),
    "1 row, nucleus": ([5], NUCLEUS),
    "1 row, to EOS": ([3], EOS),
    "1 row, min_p, records": ([5], {"min_p": 0.1, **RECORDED}),
    "1 row, context": ([9], {"top_k": 2, "prompt_lookup_num_tokens": 10}),
    "1 row, static": ([5], {"cache_implementation": "static", "disable_compile": True, **NUCLEUS}),
    "3 rows": ([9, 4, 1], {"top_k": 0, "suppress_tokens": [3]}),
    "3 rows, nucleus, records": ([5, 2, 4], NUCLEUS | RECORDED),
    "3 rows, to EOS": ([9, 4, 1], EOS | NUCLEUS),
    "3 rows, context": ([9, 4, 1], {"top_k": 2, "prompt_lookup_num_tokens": 10, **EOS}),
    "3 samples of a prompt": ([5], {"num_return_sequences": 3, "min_p": 0.1, **EOS}),
}


@pytest.fixture(scope="module")
def pair() -> Pair:
    target = make_target(seed=3)
    return target, make_drafter(target, num_assistant_tokens=20, branching_factor=4)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch, calls_of: Any) -> list[Any]:
    """Samples in one walk on a CPU, too. Holds the calls that do so; the first argument of each is the tree."""
    monkeypatch.setattr(token_choice, "_AT_ONCE_DEVICES", ("cpu", "cuda"))
    return calls_of(token_choice, "draw_at_nodes")


def sample(target: PreTrainedModel, lengths: list[int], seed: int, **kwargs: Any) -> tuple[Any, torch.Tensor]:
    """Returns what is generated, and the state of the generator afterwards."""
    device = target.device
    prompts = {name: value.to(device) for name, value in make_prompts(lengths).items()}
    torch.manual_seed(seed)
    output = target.generate(**prompts, **{"max_new_tokens": 30, "do_sample": True, "pad_token_id": 0} | kwargs)
    return output, torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state()


def check_same(target: PreTrainedModel, drafter: GumihoModel, lengths: list[int], seed: int, **kwargs: Any) -> None:
    drafted, drafted_state = sample(target, lengths, seed, **kwargs, assistant_model=drafter)
    kwargs.pop("prompt_lookup_num_tokens", None)
    plain, state = sample(target, lengths, seed, **kwargs)
    if "output_scores" in kwargs:
        torch.testing.assert_close(drafted.scores, plain.scores)
        torch.testing.assert_close(drafted.logits, plain.logits)
        plain, drafted = plain.sequences, drafted.sequences
    assert torch.equal(drafted, plain)
    assert torch.equal(drafted_state, state)


@pytest.mark.parametrize(("lengths", "kwargs"), WAYS.values(), ids=WAYS)
def test_text_records_and_generator_are_those_of_plain_decoding(
    lengths: list[int], kwargs: dict[str, Any], pair: Pair, walks: list[Any]
) -> None:
    for seed in range(3):
        check_same(*pair, lengths, seed, **kwargs)
    assert walks


def test_rows_that_are_far_ahead_are_drawn_one_token_after_the_other(
    pair: Pair, walks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_draws, "_KEPT_BYTES", 0)
    monkeypatch.setattr(token_draws, "_MIN_KEPT", 9)
    counts = []
    for seed in range(3):
        check_same(*pair, [9, 4, 1], seed, **NUCLEUS)
        output, _ = sample(pair[0], [9, 4, 1], seed, **NUCLEUS, assistant_model=pair[1], return_dict_in_generate=True)
        counts.append(len(output.tree_sizes))
    assert 0 < len(walks) < 2 * sum(counts)


class Streamer(Recorder):
    def put(self, value: torch.Tensor) -> None:
        torch.rand(1)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"streamer": Streamer()},
        {"stopping_criteria": [MaxTimeCriteria(1e9)]},
        {"repetition_penalty": 1.3},
        {"eta_cutoff": 0.1},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_where_tokens_follow_each_other(kwargs: dict[str, Any], pair: Pair, walks: list[Any]) -> None:
    for seed in range(2):
        check_same(*pair, [5], seed, **kwargs)
    assert not walks


def test_scores_that_take_much_memory_are_not_held(
    pair: Pair, walks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_choice, "_MAX_BYTES", 4 * 8 - 1)  # less than the scores of a node
    check_same(*pair, [5], 0)
    assert not walks


def test_a_cpu_draws_at_visited_nodes_alone(pair: Pair, calls_of: Any) -> None:
    walks = calls_of(token_choice, "draw_at_nodes")
    check_same(*pair, [5], 0)
    assert not walks


def test_only_what_is_committed_must_be_a_distribution(pair: Pair, walks: list[Any]) -> None:
    """After one token the target's logits are NaN: at drafts that are not chosen, or after the end of the text."""
    target, drafter = pair

    def spoil(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        logits = output.logits
        logits[kwargs["input_ids"][:, -logits.shape[1] :] == 6] = torch.nan

    with target.register_forward_hook(spoil, with_kwargs=True):
        for seed in range(4):
            check_same(target, drafter, [5], seed, suppress_tokens=[6])
            check_same(target, drafter, [5], seed, eos_token_id=6)
        assert any((walk.args[0].tokens[:, 1:] == 6).any() for walk in walks)
        num_walks = len(walks)
        for assistant in ({}, {"assistant_model": drafter}):
            with pytest.raises(RuntimeError, match="probability tensor contains either `inf`, `nan` or element < 0"):
                sample(target, [5], 0, max_new_tokens=60, **assistant)
        assert len(walks) > num_walks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("lengths", "kwargs"), WAYS.values(), ids=WAYS)
def test_on_a_gpu(lengths: list[int], kwargs: dict[str, Any], walks: list[Any]) -> None:
    target = make_target(seed=3).to("cuda")
    drafter = make_drafter(target, num_assistant_tokens=20, branching_factor=4).to("cuda")
    for seed in range(3):
        check_same(target, drafter, lengths, seed, **kwargs)
    assert walks
