"""Caches of growing and of fixed shapes hold, show and give back what lists of entries do."""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import DynamicCache

from transformers_gumiho.generation.tree.walk import AcceptedPath
from transformers_gumiho.generation.verification.tree_cache import TreeCache


NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 3, 4
NUM_NODES = 4
PROMPT_LENGTH = 3


@dataclass
class Case:
    """A generation: which prompt slots are padding, and for each pass the nodes that each row keeps."""

    padding: list[int]
    passes: list[list[list[int]]]
    num_removed: list[int]
    window: int | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch_size = draw(st.integers(1, 3))
    # The root is always the first, and all other nodes come in increasing order.
    path = st.sets(st.integers(1, NUM_NODES - 1)).map(lambda nodes: [0, *sorted(nodes)]) | st.just([])
    passes = draw(st.lists(st.lists(path, min_size=batch_size, max_size=batch_size), min_size=1, max_size=4))
    return Case(
        padding=draw(st.lists(st.integers(0, PROMPT_LENGTH - 1), min_size=batch_size, max_size=batch_size)),
        passes=passes,
        num_removed=draw(st.lists(st.integers(0, 2), min_size=batch_size, max_size=batch_size)),
        window=draw(st.none() | st.integers(1, 6)),
    )


def make_entries(batch_size: int, num_new: int) -> list[torch.Tensor]:
    """Returns keys for each layer; the values are their negatives."""
    return [torch.randn(batch_size, NUM_HEADS, num_new, HEAD_DIM) for _ in range(NUM_LAYERS)]


def seen_by(case: Case, row: int, length: int, node: int) -> list[bool]:
    """Whether a node of the chain that is the block sees each slot, by brute force."""
    window = case.window or length + NUM_NODES
    in_context = [slot >= case.padding[row] and slot > length + node - window for slot in range(length)]
    in_block = [other <= node and node - other < window for other in range(NUM_NODES)]
    return in_context + in_block


def check_pass(cache: TreeCache, case: Case, held: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Makes a pass over a block of nodes, of which each sees the ones before it; returns its entries."""
    batch_size = len(held)
    depths = torch.arange(NUM_NODES).expand(batch_size, -1)
    visible = torch.ones(batch_size, NUM_NODES, NUM_NODES, dtype=torch.bool).tril()
    starts = torch.as_tensor(cache.starts(torch.device("cpu"))).expand(batch_size, 1)
    assert starts.squeeze(1).tolist() == cache.lengths == [len(row) for row in held]
    mask = cache.attention_mask(visible, depths, torch.float32, case.window)
    new = make_entries(batch_size, NUM_NODES)
    for layer, entries in enumerate(new):
        keys, values = cache.update(entries, -entries, layer)
        assert mask.shape == (batch_size, 1, NUM_NODES, keys.shape[2])
        for row, entries_of_row in enumerate(held):
            length = len(entries_of_row)
            expected = torch.stack([*(entry[layer] for entry in entries_of_row), *entries[row].unbind(1)], dim=1)
            assert torch.equal(keys[row, :, : length + NUM_NODES], expected)
            assert torch.equal(values[row, :, : length + NUM_NODES], -expected)
            for node in range(NUM_NODES):
                seen = (mask[row, 0, node] == 0).tolist()
                assert seen[: length + NUM_NODES] == seen_by(case, row, length, node)
                assert not any(seen[length + NUM_NODES :])
    return new


def check_root_alone(cache: TreeCache, case: Case, held: list[list[torch.Tensor]], fixed: bool) -> None:
    """Checks when a pass over one token of each row is said to need no mask; one over more tokens always does."""
    lengths = [len(row) for row in held]
    sees_all = all(all(seen_by(case, row, length, 0)[: length + 1]) for row, length in enumerate(lengths))
    assert cache.needs_no_mask(1, case.window) == (sees_all and len(set(lengths)) == 1 and not fixed)
    assert not cache.needs_no_mask(2, case.window)


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@settings(max_examples=60, deadline=None)
@given(case=cases(), capacity=st.sampled_from([1, 64]), seed=st.integers(0, 99))
def test_entries_are_those_of_lists(fixed: bool, case: Case, capacity: int, seed: int) -> None:
    torch.manual_seed(seed)
    batch_size = len(case.padding)
    caller = DynamicCache()
    prompt = make_entries(batch_size, PROMPT_LENGTH)
    for layer, entries in enumerate(prompt):
        caller.update(entries, -entries, layer)
    held = [[[keys[row, :, slot] for keys in prompt] for slot in range(PROMPT_LENGTH)] for row in range(batch_size)]
    context_mask = torch.tensor([[slot >= number for slot in range(PROMPT_LENGTH)] for number in case.padding])
    context_mask = None if context_mask.all() else context_mask  # as the prompt's
    cache = TreeCache.from_dynamic(caller, 64 if fixed else capacity, context_mask)
    if fixed:
        cache.fix_shapes(torch.device("cpu"))

    for paths in case.passes:
        check_root_alone(cache, case, held, fixed)
        new = check_pass(cache, case, held)
        width = NUM_NODES if fixed else max(map(len, paths))
        nodes = torch.tensor([path + [0] * (width - len(path)) for path in paths]).view(batch_size, width)
        cache.keep_path(AcceptedPath(nodes, nodes, [len(path) for path in paths]))
        for row, path in enumerate(paths):
            held[row] += [[keys[row, :, node] for keys in new] for node in path]
    check_pass(cache, case, held)  # given up again

    cache.truncate(case.num_removed)
    held = [row[: len(row) - number] for row, number in zip(held, case.num_removed, strict=True)]
    cache.restore(caller)
    longest = max(map(len, held))
    assert caller.get_seq_length() == longest
    for index, layer in enumerate(caller.layers):
        for row, entries_of_row in enumerate(held):
            expected = torch.zeros(NUM_HEADS, longest, HEAD_DIM)
            for slot, entry in enumerate(entries_of_row):
                expected[:, slot] = entry[index]
            assert torch.equal(layer.keys[row], expected)
            assert torch.equal(layer.values[row], -expected)


def test_pending_entries_stay_until_they_are_given_up() -> None:
    """Also those of rows of different lengths: what is pending follows what is committed."""
    for fixed in (False, True):
        cache = TreeCache(2, 16)
        (first,) = make_entries(2, 3)[:1]
        cache.update(first, -first, 0)
        cache.commit([1, 3])
        if fixed:
            cache.fix_shapes(torch.device("cpu"))
        pending, newest, next_one = (torch.randn(2, NUM_HEADS, 2, HEAD_DIM) for _ in range(3))
        cache.update(pending, -pending, 0)
        cache.num_pending += 2
        keys, _ = cache.update(newest, -newest, 0)
        for row, length in enumerate((1, 3)):
            expected = torch.cat((first[row, :, :length], pending[row], newest[row]), dim=1)
            assert torch.equal(keys[row, :, : length + 4], expected)
        cache.num_pending = 0
        keys, _ = cache.update(next_one, -next_one, 0)
        for row, length in enumerate((1, 3)):
            assert torch.equal(keys[row, :, length : length + 2], next_one[row])
