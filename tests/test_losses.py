"""The training losses, against the formulas written out position by position."""

import pytest
import torch
from targets import make_drafter, make_prompts, make_target
from torch.nn import functional as F

from transformers_gumiho.losses import LossWeights, feature_loss, gumiho_loss, soft_cross_entropy


@pytest.mark.parametrize("masked", [False, True])
def test_loss_is_the_published_one(masked: bool) -> None:
    target = make_target().float()
    drafter = make_drafter(target)
    ids = make_prompts([11, 11])["input_ids"]
    states = target.model(ids).last_hidden_state.detach()
    mask = torch.ones_like(ids)
    if masked:
        mask[0, 4:7] = 0
        mask[1, :9] = 0
    output = drafter(ids[:, 1:], states[:, :-1])
    weights = LossWeights(feature=0.7, serial_cross_entropy=0.3, parallel_cross_entropy=0.2)
    loss, terms = gumiho_loss(output, states, target.lm_head, mask, weights)

    def mean_over_positions(features: torch.Tensor, shift: int) -> tuple[float, float]:
        distances, entropies = [], []
        for row in range(2):
            for position in range(11 - shift):
                if not mask[row, position + shift]:
                    continue
                feature, state = features[row, position], states[row, position + shift]
                distances.append(F.smooth_l1_loss(feature, state).item())
                probs = target.lm_head(state).softmax(dim=-1)
                entropies.append(-(probs * target.lm_head(feature).log_softmax(dim=-1)).sum().item())
        return sum(distances) / max(len(distances), 1), sum(entropies) / max(len(entropies), 1)

    distance, entropy = mean_over_positions(output.serial_features, 1)
    expected = 0.7 * distance + 0.3 * entropy
    assert terms["serial_feature"].item() == pytest.approx(distance, rel=1e-4)
    assert terms["serial_ce"].item() == pytest.approx(entropy, rel=1e-4)
    for head in range(5):
        distance, entropy = mean_over_positions(output.parallel_features[:, head], 3 + head)
        assert terms[f"parallel_{head}_feature"].item() == pytest.approx(distance, rel=1e-4)
        assert terms[f"parallel_{head}_ce"].item() == pytest.approx(entropy, rel=1e-4)
        expected += 0.8 ** (head + 1) / 9 * (0.7 * distance + 0.2 * entropy)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_perfect_features_cost_only_the_entropy_of_the_target() -> None:
    states = torch.randn(1, 6, 8)
    head = torch.nn.Linear(8, 5, bias=False)
    mask = torch.ones(1, 6)
    assert feature_loss(states, states, mask) == 0
    probs = head(states).softmax(dim=-1)
    entropy = -(probs * probs.log()).sum(dim=-1).mean()
    torch.testing.assert_close(soft_cross_entropy(head(states), probs, mask), entropy)
    assert soft_cross_entropy(head(-states), probs, mask) > entropy


def test_a_mask_of_zeros_gives_a_loss_of_zero() -> None:
    states = torch.randn(1, 6, 8, requires_grad=True)
    loss = feature_loss(states, torch.zeros(1, 6, 8), torch.zeros(1, 6))
    loss.backward()
    assert loss == 0
    assert not states.grad.any()
