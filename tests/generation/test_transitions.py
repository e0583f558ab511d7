"""Parallel heads that take the token above into account: what they draft, and what becomes of their files."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import targets
import torch
from draft_trees import paths_of
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import equals_plain, make_prompts, make_target
from trainers import make_args, make_rows
from transformers import PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.drafting.transitions import condition, extend_paths
from transformers_gumiho.generation.tree.draft_tree import DraftLevel, build_tree
from transformers_gumiho.training import GumihoTrainer


def make_drafter(target: PreTrainedModel, **settings: Any) -> GumihoModel:
    return targets.make_drafter(target, transition_rank=3, **settings)


@settings(max_examples=100, deadline=None)
@given(
    num_nodes=st.integers(1, 20), num_paths=st.integers(1, 3), num_heads=st.integers(1, 3),
    num_candidates=st.integers(1, 4), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_tree_holds_the_best_nodes_whatever_token_is_above(
    num_nodes: int, num_paths: int, num_heads: int, num_candidates: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        # Few distinct values, zero and the lowest among them, so that ties are common.
        values = torch.tensor([0.0, -1.0, -2.0, -3.0, -torch.inf])
        return values[torch.randint(0, 5, shape, generator=generator)]

    num_paths = min(num_paths, num_nodes)
    serial = DraftLevel(
        torch.arange(num_paths)[None], draw(1, num_paths).sort(descending=True).values,
        torch.zeros(1, num_paths, dtype=torch.long),
    )  # fmt: skip
    tokens = torch.rand(1, num_heads, num_paths, 9, generator=generator).argsort(dim=-1)[..., :num_candidates]
    first = draw(1, num_paths, num_candidates)
    following = draw(1, num_heads - 1, num_paths, num_candidates, num_candidates)
    under_serial = first[:, None, :, None].expand(-1, -1, -1, num_candidates, -1)
    log_probs = torch.cat((under_serial, following), dim=1)
    levels = extend_paths(serial, tokens, log_probs, num_nodes, num_nodes)
    tree = build_tree(torch.zeros(1, dtype=torch.long), [serial, *levels], num_nodes, max_depth=1 + num_heads)

    scores = {(path,): float(serial.scores[0, path]) for path in range(num_paths)}
    for path, length in itertools.product(range(num_paths), range(1, num_heads + 1)):
        for picks in itertools.product(range(num_candidates), repeat=length):
            score = scores[(path,)] + float(first[0, path, picks[0]])
            for head, (above, pick) in enumerate(itertools.pairwise(picks)):
                score += float(following[0, head, path, above, pick])
            scores[(path, *(int(tokens[0, head, path, pick]) for head, pick in enumerate(picks)))] = score
    paths = paths_of(tree, 0)
    expected = sorted(scores.values(), reverse=True)[:num_nodes]
    assert [scores[path] for path in paths] == expected == tree.scores[0, 1:].tolist()
    assert all(path[:-1] == () or path[:-1] in paths for path in paths)


def test_moved_probabilities_are_those_of_a_softmax_over_all_tokens() -> None:
    torch.manual_seed(0)
    logits, moves = torch.randn(4, 12), torch.randn(4, 3, 5)
    moved = logits[:, None].repeat(1, 3, 1)
    moved[..., :5] += moves
    expected = moved.log_softmax(dim=-1)[..., :5]
    torch.testing.assert_close(condition(logits.log_softmax(dim=-1)[:, :5], moves), expected)


def test_features_move_by_the_token_of_their_state() -> None:
    target = make_target()
    drafter, ids = make_drafter(target), make_prompts([9])["input_ids"]
    with torch.no_grad():
        states = target.model(ids).last_hidden_state
        moved = drafter(ids[:, 1:], states[:, :-1]).parallel_features
        transition, drafter.transition = drafter.transition, None
        plain = drafter(ids[:, 1:], states[:, :-1]).parallel_features
        num_serial = drafter.config.num_serial_tokens
        for head, place in itertools.product(range(plain.shape[1]), range(plain.shape[2])):
            state = place + 1 + num_serial + head  # which the feature predicts
            if state < ids.shape[1]:
                expected = plain[0, head, place] + transition[head](drafter.embed_tokens(ids[0, state]))
                torch.testing.assert_close(moved[0, head, place], expected)


@pytest.mark.parametrize("generation", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"num_assistant_tokens": 20}, {"branching_factor": 1, "draft_vocabulary": [6, 1, 5, 2]},
        {"num_assistant_tokens": 12, "branching_factor": 3, "full_tree_attention": False},
    ],
    ids=str,
)  # fmt: skip
def test_text_equals_plain(settings: dict[str, Any], generation: dict[str, Any]) -> None:
    target = make_target()
    equals_plain(target, make_drafter(target, **settings), seed=3, max_new_tokens=30, **generation)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_rows_and_fixed_shapes_equal_plain(cache: str) -> None:
    target, drafted = make_target(), {"cache_implementation": cache, "disable_compile": True}
    drafter = make_drafter(target, num_assistant_tokens=20)
    equals_plain(target, drafter, drafted=drafted, lengths=[3, 6, 4], max_new_tokens=20)


def test_transitions_are_trained_alone(tmp_path: Path) -> None:
    target = make_target().float()
    torch.manual_seed(0)
    GumihoModel.from_target(target).save_pretrained(tmp_path / "released")
    drafter = GumihoModel.from_pretrained(tmp_path / "released", transition_rank=4)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    args = make_args(tmp_path / "training", train_only="transition", max_steps=60)
    rows = make_rows()
    trainer = GumihoTrainer(drafter, args, target=target, train_dataset=rows, eval_dataset=rows)
    loss = trainer.evaluate()["eval_parallel_2_ce"]
    trainer.train()
    assert trainer.evaluate()["eval_parallel_2_ce"] < loss - 0.02
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, before[name]) != name.startswith("transition."), name


def test_released_drafter_gets_transitions_that_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, ids = make_target(), make_prompts([9])["input_ids"]
    GumihoModel.from_target(target).save_pretrained(tmp_path)
    plain, extended = (
        GumihoModel.from_pretrained(tmp_path, dtype=torch.float64, **kwargs) for kwargs in ({}, {"transition_rank": 4})
    )
    assert "has no transitions" in caplog.text
    with torch.no_grad():
        features, expected = (
            drafter(ids[:, 1:], target.model(ids).last_hidden_state[:, :-1]).parallel_features
            for drafter in (extended, plain)
        )
    assert torch.equal(features, expected)


def test_transitions_are_saved_and_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drafter = make_drafter(make_target())
    drafter.save_pretrained(tmp_path)
    found = GumihoModel.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in found.state_dict().items())
    fewer = GumihoModel.from_pretrained(tmp_path, num_parallel_heads=2)
    assert torch.equal(fewer.transition[1].up, drafter.transition[1].up)
    assert len(fewer.transition) == 2
    without = GumihoModel.from_pretrained(tmp_path, transition_rank=0)
    assert without.transition is None
    assert "are left out, as `transition_rank` is 0" in caplog.text
