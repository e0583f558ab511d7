"""The cache for draft trees takes over an ordinary one and gives it back."""

import pytest
import torch
from transformers import DynamicCache

from transformers_gumiho.target import tree_cache as cache_module
from transformers_gumiho.target.tree_cache import TreeCache


def make_dynamic(num_layers: int, length: int) -> tuple[DynamicCache, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    cache = DynamicCache()
    states = [(torch.randn(2, 3, length, 4), torch.randn(2, 3, length, 4)) for _ in range(num_layers)]
    for layer, (keys, values) in enumerate(states):
        cache.update(keys, values, layer)
    return cache, states


def test_a_long_cache_is_never_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MOVED_BYTES", 1)
    dynamic, states = make_dynamic(num_layers=32, length=100)
    size = sum(keys.nbytes + values.nbytes for keys, values in states)
    allocate, held = TreeCache.allocate, []

    def measuring_allocate(self: TreeCache, given: list) -> None:
        allocate(self, given)
        old = [layer.keys.nbytes + layer.values.nbytes for layer in dynamic.layers if layer.keys is not None]
        held.append(sum(old) + sum(group.nbytes for group, _ in self._groups))

    monkeypatch.setattr(TreeCache, "allocate", measuring_allocate)
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
    tree_cache.commit([1, 1], nodes)
    tree_cache.to_dynamic(dynamic)
    for layer, (keys, _), (new_keys, _) in zip(dynamic.layers, states, new, strict=True):
        assert torch.equal(layer.keys, torch.cat((keys, new_keys), dim=2))
