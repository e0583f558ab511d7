"""The training losses: the formulas written out position by position, and the chunked form against the eager one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_loss import TERMS as EAGER
from eager_loss import gumiho_loss
from targets import make_drafter, make_prompts, make_target
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from transformers_gumiho import GumihoOutput
from transformers_gumiho.training import LossWeights, chunked_gumiho_loss
from transformers_gumiho.training.losses.terms import TERMS, Readout
from transformers_gumiho.training.unrolling import unroll_serial_head


WEIGHTS = LossWeights(feature=0.7, serial_cross_entropy=0.3, parallel_cross_entropy=0.2)


def packed_positions() -> torch.Tensor:
    """Two rows of 11 tokens: one text of 11 in the first, three in the second."""
    return torch.tensor([list(range(11)), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("unroll", [None, unroll_serial_head])
@pytest.mark.parametrize("masked", [False, True])
def test_loss_is_the_published_one(masked: bool, unroll: Callable[..., Any] | None, packed: bool) -> None:
    target = make_target().float()
    drafter = make_drafter(target)
    ids = make_prompts([11, 11])["input_ids"]
    states = target.model(ids).last_hidden_state.detach()
    mask = torch.ones_like(ids)
    if masked:
        mask[0, 4:7] = 0
        mask[1, :9] = 0
    positions = packed_positions() if packed else None
    output = drafter(ids[:, 1:], states[:, :-1], unroll=unroll)
    loss, terms = gumiho_loss(output, states, target.lm_head, mask, WEIGHTS, positions)

    def mean_over_positions(features: torch.Tensor, shift: int) -> tuple[float, float]:
        distances, entropies = [], []
        for row in range(2):
            for position in range(11 - shift):
                predicted = position + shift
                if not mask[row, predicted] or (packed and positions[row, predicted] < shift):
                    continue
                feature, state = features[row, position], states[row, predicted]
                distances.append(F.smooth_l1_loss(feature, state).item())
                probs = target.lm_head(state).softmax(dim=-1)
                entropies.append(-(probs * target.lm_head(feature).log_softmax(dim=-1)).sum().item())
        return sum(distances) / max(len(distances), 1), sum(entropies) / max(len(entropies), 1)

    distance, entropy = mean_over_positions(output.serial_features, 1)
    expected = 0.7 * distance + 0.3 * entropy
    assert terms["serial_feature"].item() == pytest.approx(distance, rel=1e-4)
    assert terms["serial_ce"].item() == pytest.approx(entropy, rel=1e-4)
    if unroll:
        distance, entropy = mean_over_positions(output.unrolled_features[0], 2)
        expected += 0.7 * distance + 0.3 * entropy
    for head in range(5):
        distance, entropy = mean_over_positions(output.parallel_features[:, head], 3 + head)
        assert terms[f"parallel_{head}_feature"].item() == pytest.approx(distance, rel=1e-4)
        assert terms[f"parallel_{head}_ce"].item() == pytest.approx(entropy, rel=1e-4)
        expected += 0.8 ** (head + 1) / 9 * (0.7 * distance + 0.2 * entropy)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_a_mask_of_zeros_gives_a_loss_of_zero() -> None:
    for compute in (gumiho_loss, chunked_gumiho_loss):
        output, leaves = random_output()
        head = torch.nn.Linear(8, 5, bias=False)
        loss, _ = compute(output, torch.randn(2, 11, 8), head, torch.zeros(2, 11), WEIGHTS)
        loss.backward()
        assert loss == 0
        assert not any(leaf.grad.any() for leaf in leaves)


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("scale", [1.0, 30.0])  # the second makes distributions of almost one token
def test_a_closed_form_is_its_eager_term(name: str, scale: float) -> None:
    generator = torch.Generator().manual_seed(4)
    features, states = (torch.randn(6, 8, generator=generator) * scale for _ in range(2))
    head = torch.nn.Linear(8, 12, bias=False)
    results = []
    for term in (EAGER[name], TERMS[name]):
        leaf = features.clone().requires_grad_()
        values = term(Readout(leaf, head), Readout(states, head)) * torch.linspace(0, 1, 6)
        values.sum().backward()
        results.append((values.detach(), leaf.grad))
    torch.testing.assert_close(*results)


def random_output(dtype: torch.dtype = torch.float32, unroll: bool = True) -> tuple[GumihoOutput, list[torch.Tensor]]:
    """A drafter's output for two rows of 11 tokens, as leaves."""
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, 8, generator=generator).to(dtype).requires_grad_()

    serial, unrolled, parallel = leaf(2, 10), leaf(2, 9), leaf(2, 5, 8)
    output = GumihoOutput(
        serial_features=serial, parallel_features=parallel, unrolled_features=(unrolled,) if unroll else None
    )
    return output, [serial, parallel, *([unrolled] if unroll else [])]


def capped_head(features: torch.Tensor) -> torch.Tensor:
    """A head with a bias and the capping that some decoders apply: its gradient is not a matrix product."""
    weight = torch.linspace(-1, 1, 12 * 8, device=features.device).view(12, 8).sin().to(features.dtype)
    return torch.tanh((features @ weight.T + 0.1) / 2) * 2


@pytest.mark.parametrize("chunk_size", [1, 3, 1000])
@pytest.mark.parametrize("head", [torch.nn.Linear(8, 12, bias=False), capped_head])
@pytest.mark.parametrize("packed", [False, True])
def test_chunked_loss_equals_the_eager_one(packed: bool, head: Callable[..., Any], chunk_size: int) -> None:
    states = torch.randn(2, 11, 8, generator=torch.Generator().manual_seed(2))
    mask = (torch.rand(2, 11, generator=torch.Generator().manual_seed(3)) < 0.7).long()
    positions = packed_positions() if packed else None
    results = []
    for compute, settings in ((gumiho_loss, {}), (chunked_gumiho_loss, {"chunk_size": chunk_size})):
        output, leaves = random_output()
        loss, terms = compute(output, states, head, mask, WEIGHTS, positions, **settings)
        (3 * loss).backward()
        results.append((loss.detach(), terms, [leaf.grad for leaf in leaves]))
    torch.testing.assert_close(*results)


def test_gradients_of_a_half_precision_head_do_not_underflow() -> None:
    """A step of 65,536 positions divides each position's gradient by as much; float16 begins at 6e-8."""
    generator = torch.Generator().manual_seed(2)
    states, weight = torch.randn(2, 11, 8, generator=generator), torch.randn(4096, 8, generator=generator) / 4
    gradients = []
    for dtype in (torch.float32, torch.float16):
        head = torch.nn.Linear(8, 4096, bias=False, dtype=dtype)
        head.weight.data.copy_(weight)
        output, leaves = random_output()
        counts = torch.full((7,), 65536)
        lm_head = lambda features, head=head: head(features.to(head.weight.dtype))  # noqa: E731
        weights = LossWeights(feature=0)
        chunked_gumiho_loss(output, states, lm_head, torch.ones(2, 11), weights, counts=counts)[0].backward()
        gradients.append([leaf.grad for leaf in leaves])
    for exact, half in zip(*gradients, strict=True):
        assert (half - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("length", [2, 3, 4])
def test_texts_too_short_for_some_heads_train_the_others(length: int) -> None:
    target = make_target().float()
    drafter = make_drafter(target)
    ids = torch.arange(1, length + 1)[None]
    states = target.model(ids).last_hidden_state.detach()
    losses = []
    for compute in (gumiho_loss, chunked_gumiho_loss):
        output = drafter(ids[:, 1:], states[:, :-1], unroll=unroll_serial_head)
        losses.append(compute(output, states, target.lm_head, torch.ones_like(ids), WEIGHTS)[0])
    torch.testing.assert_close(*losses)
    losses[1].backward()
    # Every head takes part, as processes that train together expect.
    assert all(parameter.grad is not None for parameter in drafter.mlp.parameters())


class LargestLogits(TorchDispatchMode):
    """Records the most rows of vocabulary size that any operation returns."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.vocab_size = vocab_size
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == self.vocab_size:
                self.rows = max(self.rows, tensor.numel() // self.vocab_size)
        return result


def test_chunked_loss_never_holds_more_logits_than_a_chunk() -> None:
    head = torch.nn.Linear(8, 12, bias=False).requires_grad_(False)
    largest = {}
    for compute, settings in ((gumiho_loss, {}), (chunked_gumiho_loss, {"chunk_size": 10})):
        output, _ = random_output()
        with LargestLogits(vocab_size=12) as mode:
            compute(output, torch.randn(2, 11, 8), head, torch.ones(2, 11), WEIGHTS, **settings)[0].backward()
        largest[compute] = mode.rows
    assert largest == {gumiho_loss: 22, chunked_gumiho_loss: 10}
