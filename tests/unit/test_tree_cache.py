"""Caches of growing and of fixed shapes hold, show and give back what lists of entries do, without a second copy."""

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from targets import equals_plain, make_pair
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from transformers_gumiho.generation.verification import prompt as prompt_module
from transformers_gumiho.generation.verification import takeover
from transformers_gumiho.generation.verification import tree_cache as tree_caches
from transformers_gumiho.generation.verification.takeover import take_over
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
    cache = take_over(caller, 64 if fixed else capacity, context_mask)
    if fixed:
        cache.fix_shapes(torch.device("cpu"))

    for paths in case.passes:
        check_root_alone(cache, case, held, fixed)
        new = check_pass(cache, case, held)
        width = NUM_NODES if fixed else max(map(len, paths))
        nodes = torch.tensor([path + [0] * (width - len(path)) for path in paths]).view(batch_size, width)
        cache.keep_path(nodes, [len(path) for path in paths])
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


def make_dynamic(num_layers: int, length: int) -> tuple[DynamicCache, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    cache = DynamicCache()
    states = [(torch.randn(2, 3, length, 4), torch.randn(2, 3, length, 4)) for _ in range(num_layers)]
    for layer, (keys, values) in enumerate(states):
        cache.update(keys, values, layer)
    return cache, states


def buffers_of(cache: TreeCache) -> dict[int, int]:
    """The bytes of each buffer that the layers' keys and values lie in."""
    held = [states for layer in cache.layers for states in (layer.keys, layer.values) if states is not None]
    storages = [states.untyped_storage() for states in held]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def test_a_long_cache_is_never_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while it is taken over, nor while it grows."""
    dynamic, states = make_dynamic(num_layers=32, length=2000)
    held, add_group = list[int](), TreeCache.add_group

    def measuring(self: TreeCache, group: torch.Tensor, users: Any) -> None:
        old = [layer.keys.nbytes + layer.values.nbytes for layer in dynamic.layers if layer.keys is not None]
        held.append(sum(old) + sum(buffers_of(self).values()) + group.nbytes)
        add_group(self, group, users)

    def check(cache: TreeCache) -> None:
        assert max(held) < 1.1 * sum(buffers_of(cache).values())
        held.clear()
        for layer, (keys, values) in zip(cache.layers, states, strict=True):
            assert torch.equal(layer.keys[:, :, :2000], keys)
            assert torch.equal(layer.values[:, :, :2000], values)
            assert not layer.keys[:, :, 2000:].any()

    monkeypatch.setattr(TreeCache, "add_group", measuring)
    for module in (takeover, tree_caches):
        monkeypatch.setattr(module, "MOVED_BYTES", 1)
    cache = take_over(dynamic, capacity=2001)
    check(cache)
    cache.reserve(3000)
    assert cache.capacity == 3000 + 750, "a quarter more"
    check(cache)


def test_slots_are_reserved_as_a_text_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    capacities: list[int] = []
    grow = TreeCache.reserve

    def growing(self: TreeCache, *args: Any) -> None:
        capacities.append(self.capacity)
        grow(self, *args)

    monkeypatch.setattr(TreeCache, "reserve", growing)
    monkeypatch.setattr(prompt_module, "MAX_RESERVED_TOKENS", 64)
    monkeypatch.setattr(tree_caches, "GROWTH", 64)
    target, drafter = make_pair(num_assistant_tokens=20)
    equals_plain(target, drafter, max_new_tokens=120)
    assert len(capacities) == 2, "the target's, and the drafter's"
    assert max(capacities) < 120


class Operations(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [[5, 5], [5, 3]], ids=["even", "ragged"])
def test_paths_are_kept_in_many_buffers_by_one_index(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = torch.tensor([[0, 3, 4], [0, 2, 5]])
    numbers = []
    for moved_bytes in (2**26, 1):
        monkeypatch.setattr(takeover, "MOVED_BYTES", moved_bytes)
        dynamic, _ = make_dynamic(num_layers=32, length=5)
        cache = take_over(dynamic, capacity=20)
        cache.truncate([5 - length for length in lengths])
        with Operations() as operations:
            cache.keep_path(nodes, [3, 3])
        numbers.append((len(buffers_of(cache)), operations.number))
    (one, with_one), (many, with_many) = numbers
    assert (one, many) == (1, 16)
    assert with_many - with_one == 2 * 15, "only what is read and written"
