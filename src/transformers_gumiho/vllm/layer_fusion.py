"""The states of the target for a drafter that reads several layers."""

from typing import Any

import torch
from torch import nn

from ..model.layer_fusion import normalize_lower


class StateFusion(nn.Module):
    """
    Fuses the states of several layers of the target into the state that the serial head reads; see
    [`GumihoLayerFusion`]. Before weights are loaded, the result is the state of the highest layer.

    Args:
        num_layers: Number of layers, `k`.
        hidden_size: `H`.
        reads_last: Whether the last layer of the target is one of them. Its state is read after the final norm.
    """

    def __init__(self, num_layers: int, hidden_size: int, reads_last: bool) -> None:
        super().__init__()
        lower = torch.zeros(hidden_size, (num_layers - 1) * hidden_size)
        self.weight = nn.Parameter(torch.cat((lower, torch.eye(hidden_size)), dim=1), requires_grad=False)
        self._reads_last = reads_last
        # In a list, because the norm is not part of the drafter.
        self._final_norm: list[Any] = []

    def adopt_target(self, target: Any) -> None:
        """
        Takes the final norm from the target's language model.

        Raises:
            ValueError: The norm is not at its usual place (`model.norm`).
        """
        norm = getattr(getattr(target, "model", None), "norm", None)
        if self._reads_last and norm is None:
            raise ValueError(
                f"The drafter reads the target's last layer among others (`target_layer_ids`), and the final norm of "
                f"{type(target).__name__} is not where vLLM's models have theirs (`model.norm`). Generate with "
                f"transformers, or serve a drafter without `target_layer_ids`."
            )
        self._final_norm = [norm] if self._reads_last else []

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Maps the states of the layers, side by side `(n, k * H)`, to `(n, H)`."""
        hidden_size = len(self.weight)
        for norm in self._final_norm:
            last = norm(states[:, -hidden_size:].contiguous())
            # Some of vLLM's norms (Cohere's) also return the residual.
            last = last[0] if isinstance(last, tuple) else last
            states = torch.cat((states[:, :-hidden_size], last), dim=1)
        return nn.functional.linear(normalize_lower(states, hidden_size).to(self.weight), self.weight)
