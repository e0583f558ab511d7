"""Trees with a branch from elsewhere against brute force, and the better of two chains."""

import math

import pytest
import torch
from draft_trees import paths_of
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_gumiho.generation.tree.draft_tree import (
    DraftTree,
    build_tree,
    extend_level,
    find_ancestors,
    first_level,
)
from transformers_gumiho.generation.tree.merging import merge_branch, take_better_chain


def random_tree(batch_size: int, depth: int, width: int, num_nodes: int, generator: torch.Generator) -> DraftTree:
    """Returns a tree over five tokens, each node extended by tokens of its own."""

    def candidates(num_parents: int) -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.rand(batch_size, num_parents, 5, generator=generator).argsort(dim=2)[..., :width]
        scores = -torch.randint(0, 7, order.shape, generator=generator).float() / 2
        return order, scores.sort(dim=2, descending=True).values

    levels = [first_level(*candidates(1), num_nodes)]
    for _ in range(depth - 1):
        levels.append(extend_level(levels[-1], *candidates(levels[-1].tokens.shape[1]), num_nodes))
    return build_tree(torch.arange(batch_size), levels, num_nodes, max_depth=depth)


@st.composite
def cases(draw: st.DrawFn) -> tuple[DraftTree, torch.Tensor, torch.Tensor]:
    batch_size, depth, width = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    tree = random_tree(batch_size, depth, width, draw(st.integers(1, 30)), generator)
    length = draw(st.integers(1, 7))
    tokens = torch.randint(0, 5, (batch_size, length), generator=generator)
    log_probs = -torch.randint(0, 5, tokens.shape, generator=generator).float() / 4
    ends = torch.randint(0, length + 1, (batch_size, 1), generator=generator)
    # Behind its end the tokens of a branch mean nothing.
    return tree, tokens, log_probs.masked_fill(torch.arange(length) >= ends, -math.inf)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_merged_tree_holds_the_best_of_both(case: tuple[DraftTree, torch.Tensor, torch.Tensor]) -> None:
    tree, tokens, log_probs = case
    merged = merge_branch(tree, tokens, log_probs.cumsum(dim=1))
    num_nodes = tree.tokens.shape[1] - 1
    for row in range(len(tokens)):
        scores = dict(zip(paths_of(tree, row), tree.scores[row, 1:].tolist(), strict=True))
        above = 0.0
        for depth, log_prob in enumerate(log_probs[row].tolist(), start=1):
            path = tuple(tokens[row, :depth].tolist())
            if math.isinf(log_prob):
                break
            above = scores[path] = max(scores.get(path, -math.inf), above + log_prob)
        paths = paths_of(merged, row)
        expected = sorted(scores.values(), reverse=True)[:num_nodes]
        assert len(set(paths)) == len(paths) == num_nodes, "no token stands twice under one parent"
        assert [scores[path] for path in paths] == pytest.approx(expected)
        assert merged.scores[row].tolist() == pytest.approx([0.0, *expected])
        assert all(path[:-1] == () or path[:-1] in paths[:node] for node, path in enumerate(paths))
        assert [len(path) for path in paths] == merged.depths[row, 1:].tolist()
        assert max(map(len, paths)) <= merged.max_depth
    assert torch.equal(merged.tokens[:, 0], tree.tokens[:, 0])
    assert torch.equal(merged.ancestors, find_ancestors(merged.parents, num_nodes))


def test_a_row_without_a_branch_keeps_its_tree() -> None:
    tree = random_tree(2, 3, 3, 12, torch.Generator().manual_seed(0))
    tokens, none = torch.zeros(2, 4, dtype=torch.long), torch.full((2, 4), -math.inf)
    merged = merge_branch(tree, tokens, none)
    for name in ("tokens", "parents", "depths", "scores", "ancestors"):
        assert torch.equal(getattr(merged, name), getattr(tree, name)), name


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 6))
def test_the_chain_that_is_expected_to_be_longer_is_taken(
    case: tuple[DraftTree, torch.Tensor, torch.Tensor], depth: int
) -> None:
    _, tokens, log_probs = case
    tree = random_tree(len(tokens), depth, 1, depth, torch.Generator().manual_seed(int(tokens.sum())))
    better = take_better_chain(tree, tokens, log_probs.cumsum(dim=1))
    for name in ("parents", "depths", "ancestors", "max_depth"):
        assert getattr(better, name) is getattr(tree, name)
    for row in range(len(tokens)):
        own, scores = tree.tokens[row, 1:].tolist(), tree.scores[row].tolist()
        length = min(int((log_probs[row] > -math.inf).sum()), depth)
        branch = tokens[row, :length].tolist()
        fork = next((place for place in range(length) if branch[place] != own[place]), length)
        of_branch = [0.0]
        for place in range(length):
            above = of_branch[-1] + float(log_probs[row, place])
            of_branch.append(max(above, scores[place + 1]) if place < fork else above)
        of_chain = [*of_branch[: fork + 1], *(s + of_branch[fork] - scores[fork] for s in scores[fork + 1 :])]
        gain = sum(map(math.exp, of_branch)) - sum(map(math.exp, of_chain))
        taken = better.tokens[row, 1:].tolist()
        if abs(gain) > 1e-5:
            assert taken == ([*branch, *own[length:]] if gain > 0 else own)
        assert taken in ([*branch, *own[length:]], own)
        assert all(a >= b for a, b in zip(better.scores[row].tolist(), better.scores[row, 1:].tolist(), strict=False))
