"""The paths that are enumerated beforehand hold the best ones, whatever the scores turn out to be."""

import itertools

import torch
from draft_trees import paths_of
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_gumiho.tree.draft_tree import build_tree, extend_level, first_level
from transformers_gumiho.tree.recombination import MAX_RECOMBINATIONS, Recombinations


@settings(max_examples=200, deadline=None)
@given(
    batch_size=st.integers(1, 2),
    num_nodes=st.integers(1, 24),
    num_kept=st.integers(1, 3),
    num_heads=st.integers(1, 3),
    num_candidates=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_tree_holds_the_best_nodes_where_the_heads_see_the_serial_path(
    batch_size: int, num_nodes: int, num_kept: int, num_heads: int, num_candidates: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.rand(*shape, 9, generator=generator).argsort(dim=-1)
        # Few distinct values, zero and the lowest among them, so that ties are common.
        values = torch.tensor([0.0, -1.0, -2.0, -3.0, -torch.inf])
        log_probs = values[torch.randint(0, 5, (*shape, 9), generator=generator)]
        return tokens, log_probs.sort(dim=-1, descending=True).values

    # Two serial tokens, of which the first `num_kept` paths are extended.
    first = first_level(*(drawn[..., :num_kept] for drawn in draw(batch_size, 1)), num_nodes)
    num_first = first.tokens.shape[1]
    last = extend_level(first, *(drawn[..., :num_kept] for drawn in draw(batch_size, num_first)), num_nodes)
    num_paths = min(num_kept, last.tokens.shape[1])
    tokens, log_probs = (drawn[..., :num_candidates] for drawn in draw(batch_size, num_heads, num_paths))
    recombinations = Recombinations.find(
        num_nodes, serial_depth=2, num_above=last.tokens.shape[1], num_paths=num_paths, num_heads=num_heads,
        num_candidates=num_candidates, batch_size=batch_size,
    )  # fmt: skip
    assert recombinations is not None
    levels = [first, last, recombinations.grow(last, tokens, log_probs)]
    tree = build_tree(torch.zeros(batch_size, dtype=torch.long), levels, num_nodes, max_depth=2 + num_heads)

    for row in range(batch_size):
        scores = {(int(first.tokens[row, node]),): float(first.scores[row, node]) for node in range(num_first)}
        serial_paths = []
        for node, score in enumerate(last.scores[row]):
            serial_paths.append((int(first.tokens[row, last.parents[row, node]]), int(last.tokens[row, node])))
            scores[serial_paths[-1]] = float(score)
        for path, length in itertools.product(range(num_paths), range(1, num_heads + 1)):
            for picks in itertools.product(range(num_candidates), repeat=length):
                added = [int(tokens[row, head, path, pick]) for head, pick in enumerate(picks)]
                values = [float(log_probs[row, head, path, pick]) for head, pick in enumerate(picks)]
                scores[(*serial_paths[path], *added)] = sum(values, start=float(last.scores[row, path]))
        paths = paths_of(tree, row)
        expected = sorted(scores.values(), reverse=True)[:num_nodes]
        assert len(set(paths)) == len(paths) == len(expected)
        assert [scores[path] for path in paths] == expected == tree.scores[row, 1:].tolist()
        assert all(path[:-1] == () or path[:-1] in paths for path in paths)
        assert tree.depths[row, 1:].tolist() == [len(path) for path in paths]


def test_only_few_paths_are_enumerated() -> None:
    shape = {"serial_depth": 2, "num_above": 40, "num_paths": 10, "num_heads": 5, "num_candidates": 40}
    assert Recombinations.find(num_nodes=40, **shape) is None
    few = Recombinations.find(num_nodes=12, **shape)
    assert few is not None
    level = first_level(torch.zeros(1, 1, 40, dtype=torch.long), torch.zeros(1, 1, 40), 40)
    grown = few.grow(level, torch.zeros(1, 5, 10, 40, dtype=torch.long), torch.zeros(1, 5, 10, 40))
    assert grown.tokens.shape[1] <= MAX_RECOMBINATIONS
