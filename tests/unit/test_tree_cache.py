"""The cache for draft trees takes over an ordinary one and gives it back."""

from typing import Any

import pytest
import torch
from targets import equals_plain, make_pair
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from transformers_gumiho.generation.tree.walk import AcceptedPath
from transformers_gumiho.generation.verification import prompt as prompt_module
from transformers_gumiho.generation.verification import tree_cache as tree_caches
from transformers_gumiho.generation.verification.tree_cache import TreeCache


def make_dynamic(num_layers: int, length: int) -> tuple[DynamicCache, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    cache = DynamicCache()
    states = [(torch.randn(2, 3, length, 4), torch.randn(2, 3, length, 4)) for _ in range(num_layers)]
    for layer, (keys, values) in enumerate(states):
        cache.update(keys, values, layer)
    return cache, states


def test_a_long_cache_is_never_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_caches, "MOVED_BYTES", 1)
    dynamic, states = make_dynamic(num_layers=32, length=100)
    size = sum(keys.nbytes + values.nbytes for keys, values in states)
    allocate, held = TreeCache.allocate, []

    def measuringallocate(self: TreeCache, given: list) -> None:
        allocate(self, given)
        old = [layer.keys.nbytes + layer.values.nbytes for layer in dynamic.layers if layer.keys is not None]
        held.append(sum(old) + sum(group.nbytes for group, _ in self._groups))

    monkeypatch.setattr(TreeCache, "allocate", measuringallocate)
    tree_cache = TreeCache.from_dynamic(dynamic, capacity=101)
    assert max(held) < 1.1 * size
    for layer, (keys, values) in zip(tree_cache.layers, states, strict=True):
        assert torch.equal(layer.keys[:, :, :100], keys)
        assert torch.equal(layer.values[:, :, :100], values)
        assert not layer.keys[:, :, 100:].any()
    # Accepted entries are kept in place in all of the buffers, and come back.
    nodes = torch.tensor([[0], [0]])
    new = [(torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1, 4)) for _ in states]
    for index, (keys, values) in enumerate(new):
        tree_cache.update(keys, values, index)
    tree_cache.keep_path(AcceptedPath(nodes, nodes, [1, 1]))
    tree_cache.restore(dynamic)
    for layer, (keys, _), (new_keys, _) in zip(dynamic.layers, states, new, strict=True):
        assert torch.equal(layer.keys, torch.cat((keys, new_keys), dim=2))


def test_a_cache_that_grows_is_never_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamic, states = make_dynamic(num_layers=32, length=2000)
    cache = TreeCache.from_dynamic(dynamic, capacity=2001)
    assert len(buffers_of(cache)) == 1, "a small cache, in one buffer until it grows"
    monkeypatch.setattr(tree_caches, "MOVED_BYTES", 1)
    cache.reserve(2100)
    held, add_group = [], TreeCache.add_group

    def measuring(self: TreeCache, group: torch.Tensor, users: Any) -> None:
        held.append(sum(buffers_of(cache).values()) + group.nbytes)
        add_group(self, group, users)

    monkeypatch.setattr(TreeCache, "add_group", measuring)
    cache.reserve(3000)
    assert cache.capacity == 3000 + 750, "a quarter more"
    size = sum(buffers_of(cache).values())
    assert size == 32 * 2 * 2 * 3 * 4 * 3750 * 4
    assert max(held) < 1.1 * size
    for layer, (keys, values) in zip(cache.layers, states, strict=True):
        assert torch.equal(layer.keys[:, :, :2000], keys)
        assert torch.equal(layer.values[:, :, :2000], values)
        assert not layer.keys[:, :, 2000:].any()


def test_slots_are_reserved_as_a_text_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    capacities: list[int] = []
    grow = TreeCache.reserve

    def growing(self: TreeCache, num_slots: int) -> None:
        capacities.append(self.capacity)
        grow(self, num_slots)

    monkeypatch.setattr(TreeCache, "reserve", growing)
    monkeypatch.setattr(prompt_module, "MAX_RESERVED_TOKENS", 64)
    monkeypatch.setattr(tree_caches, "GROWTH", 64)
    target, drafter = make_pair(num_assistant_tokens=20)
    equals_plain(target, drafter, max_new_tokens=120)
    assert len(capacities) == 2, "the target's, and the drafter's"
    assert max(capacities) < 120


def buffers_of(cache: TreeCache) -> dict[int, int]:
    """The bytes of each buffer that the layers' keys and values lie in."""
    storages = [states.untyped_storage() for layer in cache.layers for states in (layer.keys, layer.values)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


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
        monkeypatch.setattr(tree_caches, "MOVED_BYTES", moved_bytes)
        dynamic, _ = make_dynamic(num_layers=32, length=5)
        cache = TreeCache.from_dynamic(dynamic, capacity=20)
        cache.truncate([5 - length for length in lengths])
        with Operations() as operations:
            cache.keep_path(AcceptedPath(nodes, nodes, [3, 3]))
        numbers.append((len(buffers_of(cache)), operations.number))
    (one, with_one), (many, with_many) = numbers
    assert (one, many) == (1, 16)
    assert with_many - with_one == 2 * 15, "only what is read and written"
