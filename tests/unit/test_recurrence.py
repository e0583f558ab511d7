"""Recurrences and convolutions over trees against one node after the other, along every path, from its own state."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_gumiho.generation.tree.draft_tree import find_ancestors
from transformers_gumiho.generation.tree.recurrence import (
    NodeTerms,
    convolve,
    run_delta_rule,
    run_scan,
    take_windows,
    window_places,
)


ROWS, HEADS, KEYS, VALUES = 2, 2, 5, 3


def path_to(parents: torch.Tensor, row: int, node: int) -> list[int]:
    path = [node]
    while path[0] != 0:
        path.insert(0, int(parents[row, path[0]]))
    return path


def tree_of(num_nodes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the parents, depths and ancestors of a random tree in each row."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.zeros(ROWS, num_nodes, dtype=torch.long)
    for node in range(1, num_nodes):
        parents[:, node] = torch.randint(max(node - 4, 0), node, (ROWS,), generator=generator)
    ancestors = find_ancestors(parents, num_nodes)
    return parents, ancestors.sum(dim=2) - 1, ancestors


def drawn(seed: int, *sizes: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def delta_step(state: Any, query: Any, key: Any, value: Any, decay: Any, beta: Any) -> tuple[Any, Any]:
    """One token of one row, as in the recurrent functions of transformers."""
    state = state * decay.exp()[:, :, None]
    change = (value - torch.einsum("hkv,hk->hv", state, key)) * beta
    state = state + torch.einsum("hk,hv->hkv", key, change)
    return state, torch.einsum("hkv,hk->hv", state, query)


def scan_step(state: Any, inputs: Any, decay: Any, write: Any, read: Any) -> tuple[Any, Any]:
    state = state * decay.exp()[:, :, None] + torch.einsum("hk,hv->hkv", inputs, write)
    return state, torch.einsum("hkv,hv->hk", state, read)


def delta_rule_inputs(num_nodes: int, seed: int, decays: int) -> list[torch.Tensor]:
    sizes = ROWS, HEADS, num_nodes
    key = torch.nn.functional.normalize(drawn(seed + 1, *sizes, KEYS), dim=-1)
    decay, beta = -drawn(seed + 3, *sizes, decays).exp(), drawn(seed + 4, *sizes, 1).sigmoid()
    return [drawn(seed, *sizes, KEYS), key, drawn(seed + 2, *sizes, VALUES), decay, beta]


def scan_inputs(num_nodes: int, seed: int) -> list[torch.Tensor]:
    sizes = ROWS, HEADS, num_nodes
    decay = -drawn(seed + 1, *sizes, 1).exp()
    return [drawn(seed, *sizes, KEYS), decay, drawn(seed + 2, *sizes, VALUES), drawn(seed + 3, *sizes, VALUES)]


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[int, int], list[torch.Tensor]]]] = {
    "delta rule": (run_delta_rule, delta_step, lambda n, seed: delta_rule_inputs(n, seed, 1)),
    "delta rule by channel": (run_delta_rule, delta_step, lambda n, seed: delta_rule_inputs(n, seed, KEYS)),
    "scan": (run_scan, scan_step, scan_inputs),
}


def along(step: Callable[..., Any], state: torch.Tensor, inputs: Sequence[torch.Tensor], row: int, path: Any) -> Any:
    """Returns the state of a row after a path, and the output of its last node."""
    state, output = state[row], None
    for node in path:
        state, output = step(state, *(own[row, :, node] for own in inputs))
    return state, output


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 14), st.integers(0, 2**16))
def test_each_node_and_each_path_as_one_token_after_the_other(kind: str, num_nodes: int, seed: int) -> None:
    run, step, make_inputs = KINDS[kind]
    parents, _, ancestors = tree_of(num_nodes, seed)
    inputs, state = make_inputs(num_nodes, seed), drawn(seed + 9, ROWS, HEADS, KEYS, VALUES)
    outputs, terms = run(*inputs, state, ancestors)
    for node in range(num_nodes):
        paths = [path_to(parents, row, node) for row in range(ROWS)]
        expected = [along(step, state, inputs, row, path) for row, path in enumerate(paths)]
        assert error_of(outputs[:, :, node], torch.stack([output for _, output in expected])) < 1e-12
        # Rows accept paths of their own lengths, and what follows a path is not read.
        padded = torch.tensor([[*path, *[num_nodes - 1] * (num_nodes - len(path))] for path in paths])
        after = terms.state_after(state, padded, torch.tensor([[len(path)] for path in paths]))
        assert error_of(after, torch.stack([state for state, _ in expected])) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_accepts_nothing_keeps_its_state_exactly(kind: str) -> None:
    run, _, make_inputs = KINDS[kind]
    _, _, ancestors = tree_of(6, 0)
    state = drawn(9, ROWS, HEADS, KEYS, VALUES)
    _, terms = run(*make_inputs(6, 0), state, ancestors)
    after = terms.state_after(state, torch.zeros(ROWS, 3, dtype=torch.long), torch.tensor([[0], [1]]))
    assert torch.equal(after[0], state[0])
    assert not torch.equal(after[1], state[1])


@pytest.mark.parametrize("kind", KINDS)
def test_error_in_float32_with_decays_that_leave_nothing(kind: str) -> None:
    run, step, make_inputs = KINDS[kind]
    parents, _, ancestors = tree_of(64, 1)
    inputs, state = make_inputs(64, 1), drawn(9, ROWS, HEADS, KEYS, VALUES)
    place = 1 if kind == "scan" else 3
    inputs[place][:, :, ::5] *= 1e4  # exp() of it is 0, and of its negative infinite
    outputs, terms = run(*(own.float() for own in inputs), state.float(), ancestors)
    path = path_to(parents, 0, 63)
    expected, output = along(step, state, inputs, 0, path)
    assert outputs.dtype == torch.float32
    assert error_of(outputs[0, :, 63], output) < 1e-5
    after = terms.state_after(state.float(), torch.tensor([path] * ROWS), torch.full((ROWS, 1), len(path)))
    assert error_of(after[0], expected) < 1e-5


def test_layers_move_on_together_as_each_alone() -> None:
    _, _, ancestors = tree_of(7, 2)
    states = drawn(3, 3, ROWS, HEADS, KEYS, VALUES)
    terms = [run_delta_rule(*delta_rule_inputs(7, seed, 1), states[seed], ancestors)[1] for seed in range(3)]
    path, lengths = torch.tensor([[0, 1, 3], [0, 2, 6]]), torch.tensor([[3], [2]])
    together = NodeTerms.stack(terms).state_after(states, path, lengths)
    alone = [term.state_after(state, path, lengths) for term, state in zip(terms, states, strict=True)]
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize("num_before", [3, 4])  # of a window of 4, with or without the token's own input
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 14), st.integers(0, 2**16))
def test_convolutions_as_over_each_path(num_before: int, num_nodes: int, seed: int) -> None:
    parents, depths, _ = tree_of(num_nodes, seed)
    channels, width = 3, 4
    before, inputs = drawn(seed, ROWS, channels, num_before), drawn(seed + 1, ROWS, channels, num_nodes)
    weight, bias = drawn(seed + 2, channels, width), drawn(seed + 3, channels)
    joined = torch.cat((before, inputs), dim=2)
    every = torch.arange(num_nodes).expand(ROWS, -1)
    windows = take_windows(joined, window_places(parents, depths, every, width, num_before))
    found = convolve(windows, weight, bias)
    kept = take_windows(joined, window_places(parents, depths, every, num_before, num_before))
    for row in range(ROWS):
        for node in range(num_nodes):
            text = torch.cat((before[row], inputs[row][:, path_to(parents, row, node)]), dim=1)
            expected = torch.nn.functional.conv1d(text[None], weight[:, None], bias, groups=channels)[0, :, -1]
            assert error_of(found[row, :, node], expected) < 1e-12
            assert torch.equal(kept[row, node].T, text[:, -num_before:])


def test_a_convolution_in_16_bits_rounds_before_its_activation() -> None:
    windows, weight = drawn(0, 1, 5, 4, 3).bfloat16(), drawn(1, 3, 4).bfloat16()
    plain = torch.nn.functional.conv1d(windows[0].transpose(1, 2), weight[:, None], groups=3)[:, :, 0].T[None]
    found = convolve(windows, weight, None)
    assert found.dtype == torch.bfloat16
    assert error_of(found, plain) < 1e-3  # equal but for single roundings
