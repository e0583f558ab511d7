"""The fusion of several of the target's layers into the state that the serial head reads."""

import torch
from torch import nn

from ..internals import was_loaded
from .configuration_gumiho import GumihoConfig


# Of the mean square, for a state that is all zeros.
_EPSILON = 1e-6


def normalize_lower(layer_states: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """
    Scales the states of k layers `(..., k * H)` to a root mean square of 1 each, but for those of the last layer.
    Below the final norm, states are small in early layers and have a few huge entries in later ones; one learning rate
    does not fit both.
    """
    if layer_states.shape[-1] <= hidden_size:
        return layer_states
    lower, highest = layer_states[..., :-hidden_size], layer_states[..., -hidden_size:]
    states = lower.unflatten(-1, (-1, hidden_size)).float()
    states = states * (states.square().mean(dim=-1, keepdim=True) + _EPSILON).rsqrt()
    return torch.cat((states.flatten(-2).to(highest), highest), dim=-1)


class GumihoLayerFusion(nn.Linear):
    """
    A linear layer without bias from the states of the target's `target_layer_ids` `(..., k * H)`, the highest layer's
    last and the others as [`normalize_lower`] made them, to `(..., H)`.

    It starts as the state of the highest of these layers.
    """

    def __init__(self, config: GumihoConfig):
        hidden_size = config.get_text_config().hidden_size
        super().__init__(len(config.target_layer_ids or ()) * hidden_size, hidden_size, bias=False)

    def reset_parameters(self) -> None:
        # The functions of `nn.init` see this of a weight, but not of a slice of one.
        if not was_loaded(self.weight):
            nn.init.zeros_(self.weight)
            nn.init.eye_(self.weight[:, -self.out_features :])
