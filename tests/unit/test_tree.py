"""Draft trees against brute force: the best nodes, their parents, what each sees, and branches from elsewhere."""

import itertools
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
    tree_attention_mask,
)
from transformers_gumiho.generation.tree.merging import merge_branch, take_better_chain
from transformers_gumiho.generation.tree.walk import find_children, walk_tree


def grow(level_tokens: torch.Tensor, level_log_probs: torch.Tensor, root: torch.Tensor, num_nodes: int) -> DraftTree:
    """Grows a tree in which the tokens of a depth do not depend on the path: `(B, depth, M)` each."""
    level = extend_level(None, level_tokens[:, :1], level_log_probs[:, :1], num_nodes)
    levels = [level]
    for tokens, log_probs in zip(level_tokens.unbind(1)[1:], level_log_probs.unbind(1)[1:], strict=True):
        width = level.tokens.shape[1]
        level = extend_level(
            level, tokens[:, None].expand(-1, width, -1), log_probs[:, None].expand(-1, width, -1), num_nodes
        )
        levels.append(level)
    return build_tree(root, levels, num_nodes, max_depth=len(levels))


@st.composite
def candidates(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    batch_size, depth, width = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    seed, num_nodes = draw(st.integers(0, 2**16)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(9, generator=generator)[:width] for _ in range(batch_size * depth)]).view(
        batch_size, depth, width
    )
    # Few distinct values, zero among them, so that ties between a node and its parent are common.
    log_probs = -torch.randint(0, 5, tokens.shape, generator=generator).float()
    return tokens, log_probs.sort(dim=2, descending=True).values, num_nodes


@settings(max_examples=150, deadline=None)
@given(candidates())
def test_tree_holds_the_best_nodes_of_all_recombinations(case: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    tokens, log_probs, num_nodes = case
    batch_size, depth, width = tokens.shape
    root = torch.arange(batch_size)
    tree = grow(tokens, log_probs, root, num_nodes)
    assert torch.equal(tree.tokens[:, 0], root)
    for row in range(batch_size):
        scores = {}
        for length in range(1, depth + 1):
            for picks in itertools.product(range(width), repeat=length):
                path = tuple(int(tokens[row, level, pick]) for level, pick in enumerate(picks))
                scores[path] = sum(float(log_probs[row, level, pick]) for level, pick in enumerate(picks))
        paths = paths_of(tree, row)
        expected = sorted(scores.values(), reverse=True)[:num_nodes]
        assert len(set(paths)) == len(paths) == len(expected)
        # Ties may be broken either way, so scores are compared, not paths. In order: parents before children.
        assert [scores[path] for path in paths] == expected
        assert tree.scores[row].tolist() == [0.0, *expected]
        assert all(int(tree.parents[row, node]) < node for node in range(1, len(paths) + 1))
        assert [len(path) for path in paths] == tree.depths[row, 1:].tolist()
        # Of each path, every prefix is in the tree.
        assert all(path[:-1] == () or path[:-1] in paths for path in paths)


@settings(max_examples=100, deadline=None)
@given(candidates())
def test_ancestors_are_the_nodes_met_on_the_way_to_the_root(case: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    tree = grow(*case[:2], torch.zeros(case[0].shape[0], dtype=torch.long), case[2])
    for row, (parents, ancestors) in enumerate(zip(tree.parents.tolist(), tree.ancestors, strict=True)):
        for node in range(len(parents)):
            met = {node}
            while node != 0:
                node = parents[node]
                met.add(node)
            start = max(met)
            assert set(ancestors[start].nonzero().flatten().tolist()) == met, row


@settings(max_examples=150, deadline=None)
@given(candidates(), st.integers(0, 2**16))
def test_walk_is_the_one_that_takes_one_step_after_the_other(
    case: tuple[torch.Tensor, torch.Tensor, int], seed: int
) -> None:
    tree = grow(*case[:2], torch.zeros(case[0].shape[0], dtype=torch.long), case[2])
    generator = torch.Generator().manual_seed(seed)
    # Choices among the tokens of the tree, so that walks get somewhere.
    index = torch.randint(0, tree.tokens.shape[1], tree.tokens.shape, generator=generator)
    choices = tree.tokens.gather(1, index)
    visited, packed = walk_tree(tree, choices)
    for row in range(tree.tokens.shape[0]):
        node, nodes, tokens = 0, [], []
        while node is not None:
            nodes.append(node)
            tokens.append(int(choices[row, node]))
            children = [
                child
                for child in range(1, tree.tokens.shape[1])
                if int(tree.parents[row, child]) == node and int(tree.tokens[row, child]) == tokens[-1]
            ]
            child, found = find_children(tree, torch.full((index.shape[0], 1), node), choices[:, node : node + 1])
            assert bool(found[row]) == bool(children)
            node = children[0] if children else None
            assert node is None or int(child[row]) == node
        count, *chosen = packed[row].tolist()
        assert visited[row, :count].tolist() == nodes
        assert chosen[:count] == tokens


@settings(max_examples=150, deadline=None)
@given(
    case=candidates(),
    lengths=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    window=st.none() | st.integers(1, 8),
    padded=st.booleans(),
    num_unused=st.integers(0, 3),
)
def test_attention_mask_by_brute_force(
    case: tuple[torch.Tensor, torch.Tensor, int], lengths: list[int], window: int | None, padded: bool, num_unused: int
) -> None:
    tree = grow(*case[:2], torch.zeros(case[0].shape[0], dtype=torch.long), case[2])
    batch_size, num_nodes = tree.tokens.shape
    lengths = lengths[:batch_size]
    context = torch.rand(batch_size, max(lengths), generator=torch.Generator().manual_seed(0)) < 0.7
    starts = torch.tensor(lengths)[:, None] if len(set(lengths)) > 1 else lengths[0]
    num_slots, seen = max(lengths) + num_nodes + num_unused, context if padded else None
    mask = tree_attention_mask(tree.ancestors, tree.depths, starts, num_slots, torch.float32, seen, window)
    assert mask.shape == (batch_size, 1, num_nodes, num_slots)
    for row, length in enumerate(lengths):
        for query, slot in itertools.product(range(num_nodes), range(mask.shape[3])):
            position = length + int(tree.depths[row, query])
            if slot < length:
                sees = not padded or bool(context[row, slot])
                distance = position - slot
            elif slot - length < num_nodes:
                sees = bool(tree.ancestors[row, query, slot - length])
                distance = position - length - int(tree.depths[row, slot - length])
            else:
                sees, distance = False, 0
            sees = sees and (window is None or distance < window)
            assert mask[row, 0, query, slot] == (0 if sees else torch.finfo(torch.float32).min)


@pytest.mark.parametrize("depth", range(1, 9))
def test_ancestors_of_the_longest_chain(depth: int) -> None:
    tokens = torch.arange(depth)[None, :, None]
    tree = grow(tokens, torch.full(tokens.shape, -0.5), torch.tensor([3]), 63)
    assert torch.equal(tree.ancestors[0], torch.ones(depth + 1, depth + 1).tril().bool())


def random_tree(batch_size: int, depth: int, width: int, num_nodes: int, generator: torch.Generator) -> DraftTree:
    """Returns a tree over five tokens, each node extended by tokens of its own."""

    def candidates(num_parents: int) -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.rand(batch_size, num_parents, 5, generator=generator).argsort(dim=2)[..., :width]
        scores = -torch.randint(0, 7, order.shape, generator=generator).float() / 2
        return order, scores.sort(dim=2, descending=True).values

    levels = [extend_level(None, *candidates(1), num_nodes)]
    for _ in range(depth - 1):
        levels.append(extend_level(levels[-1], *candidates(levels[-1].tokens.shape[1]), num_nodes))
    return build_tree(torch.arange(batch_size), levels, num_nodes, max_depth=depth)


@st.composite
def trees_and_branches(draw: st.DrawFn) -> tuple[DraftTree, torch.Tensor, torch.Tensor]:
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
@given(trees_and_branches())
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
@given(trees_and_branches(), st.integers(1, 6))
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
