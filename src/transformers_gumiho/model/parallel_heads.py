"""The parallel MLP heads of a drafter: stored one by one, run as one batched product."""

from typing import Any

import torch
from torch import nn

from ..internals import has_placement_hook
from .configuration_gumiho import GumihoConfig


class GumihoHeadLinear(nn.Linear):
    """A linear layer whose weights start at zero."""


class GumihoHeadBlock(nn.Module):
    """`SiLU(Linear(x))`, added to `x` where `residual`: such a block starts as the identity."""

    def __init__(self, in_features: int, out_features: int, residual: bool):
        super().__init__()
        self.linear = GumihoHeadLinear(in_features, out_features)
        self.residual = residual

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        update = nn.functional.silu(self.linear(hidden_states))
        return hidden_states + update if self.residual else update


class GumihoParallelHeads(nn.ModuleList):
    """
    The parallel heads. Head i drafts token S+1+i of a path from the fused inputs of the path's S serial tokens; the
    heads share that input and do not see each other.

    Each head is stored as its own modules, under the names of the published checkpoints. For inference
    [`batched_weights`] lays the heads' parameters one after the other in memory without changing them, so that one
    product serves all heads.
    """

    def __init__(self, config: GumihoConfig):
        hidden_size = config.get_text_config().hidden_size
        super().__init__(
            nn.ModuleList(
                GumihoHeadBlock(
                    in_features=hidden_size if block else config.num_serial_tokens * config.fused_width,
                    out_features=hidden_size,
                    residual=block > 0,
                )
                for block in range(config.num_residual_blocks + 1)
            )
            for _ in range(config.num_parallel_heads)
        )
        self.hidden_size = hidden_size

    def forward(self, path_inputs: torch.Tensor) -> torch.Tensor:
        """Maps `(B, T, S * H)` to the features of all heads, `(B, P, T, H)`."""
        features = []
        for head in self:
            hidden_states = path_inputs
            for block in head.children():
                hidden_states = block(hidden_states)
            features.append(hidden_states)
        if not features:
            return path_inputs.new_zeros(path_inputs.shape[0], 0, path_inputs.shape[1], self.hidden_size)
        return torch.stack(features, dim=1)

    @torch.inference_mode(False)  # or the parameters would become tensors that cannot be trained any more
    @torch.no_grad()
    def batched_weights(self) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """
        Returns, for each block, the weights `(P, in, out)` and biases `(P, 1, out)` of all heads.

        On the first call the parameters become views of shared storage, so the tensors follow training and loading.
        Returns `None` where a linear layer is quantized, offloaded or has an adapter; use `forward` then.
        """
        heads = [list(head.children()) for head in self]
        if not heads or not all(_is_plain_linear(block.linear) for head in heads for block in head):
            return None
        blocks = []
        for heads_of_block in zip(*heads, strict=True):
            weight = _as_one_tensor([block.linear.weight for block in heads_of_block])
            bias = _as_one_tensor([block.linear.bias for block in heads_of_block])
            blocks.append((weight.transpose(1, 2), bias[:, None]))
        return blocks


def run_batched_heads(
    weights: list[tuple[torch.Tensor, torch.Tensor]], path_inputs: torch.Tensor, num_heads: int
) -> torch.Tensor:
    """
    Returns the features `(B, num_heads, T, H)` of the first heads, by one batched product for each block, for the
    [`GumihoParallelHeads.batched_weights`] and the fused inputs `(B, T, S * H)` of each path's serial tokens.
    """
    batch_size, num_paths, width = path_inputs.shape
    hidden_states = path_inputs.reshape(1, -1, width).expand(num_heads, -1, -1)
    for index, (weight, bias) in enumerate(weights):
        update = nn.functional.silu(torch.baddbmm(bias[:num_heads], hidden_states, weight[:num_heads]))
        hidden_states = hidden_states + update if index else update
    return hidden_states.view(num_heads, batch_size, num_paths, -1).transpose(0, 1)


def _is_plain_linear(linear: Any) -> bool:
    if has_placement_hook(linear):
        return False
    return type(linear) is GumihoHeadLinear and type(linear.weight) is nn.Parameter


def _as_one_tensor(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Returns the parameters as one tensor with a new first dimension whose storage they share."""
    first, size = parameters[0], parameters[0].numel()
    storage = first.data.untyped_storage().data_ptr()
    shared = all(
        parameter.is_contiguous()
        and parameter.data.untyped_storage().data_ptr() == storage
        and parameter.storage_offset() == index * size
        for index, parameter in enumerate(parameters)
    )
    if not shared:
        stacked = torch.stack([parameter.data for parameter in parameters])
        for parameter, view in zip(parameters, stacked, strict=True):
            parameter.data = view
    return torch.as_strided(first.data, (len(parameters), *first.shape), (size, *first.stride()), 0)
