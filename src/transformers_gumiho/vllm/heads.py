"""The parallel heads and the output head in vLLM's processes."""

from typing import Any

import torch
from torch import nn

from ..model.parallel_heads import run_batched_heads


class BatchedHeads(nn.Module):
    """
    The first `num_heads` parallel heads. Each block of all heads is one parameter, so that one product computes it.

    Args:
        num_heads: Number of heads, `P`.
        hidden_size: `H`.
        num_serial_tokens: `S`. The heads read `S * H` numbers.
        num_residual_blocks: Number of blocks after the first.
    """

    def __init__(self, num_heads: int, hidden_size: int, num_serial_tokens: int, num_residual_blocks: int) -> None:
        super().__init__()
        widths = [num_serial_tokens * hidden_size] + [hidden_size] * num_residual_blocks
        self.num_heads = num_heads
        self.weight = nn.ParameterList(_empty(num_heads, hidden_size, width) for width in widths)
        self.bias = nn.ParameterList(_empty(num_heads, hidden_size) for _ in widths)

    def places(self) -> dict[str, torch.Tensor]:
        """Returns the places of a checkpoint's tensors, by their plain names."""
        return {
            f"mlp.{head}.{block}.linear.{kind}": parameter.data[head]
            for kind, blocks in (("weight", self.weight), ("bias", self.bias))
            for block, parameter in enumerate(blocks)
            for head in range(self.num_heads)
        }

    def forward(self, path_inputs: torch.Tensor) -> torch.Tensor:
        """Maps the fused inputs of `n` chains, `(n, S * H)`, to the features of all heads, `(n, P, H)`."""
        weights = [
            (weight.transpose(1, 2), bias[:, None]) for weight, bias in zip(self.weight, self.bias, strict=True)
        ]
        return run_batched_heads(weights, path_inputs[None], self.num_heads)[0].transpose(0, 1)


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class DraftingHead:
    """
    The target's output head, cut to the tokens that may be drafted.

    Args:
        lm_head: The target's output head, as vLLM shares it with drafters.
        token_ids (`(K,)`): Ids of the tokens that may be drafted.
    """

    def __init__(self, lm_head: Any, token_ids: torch.Tensor) -> None:
        self.token_ids = token_ids
        self._rows = self._bias = None
        # If the head is quantized, or split over processes, its logits are cut instead.
        if _is_whole_matrix(lm_head):
            self._rows = lm_head.weight.index_select(0, token_ids)
            bias = getattr(lm_head, "bias", None)
            self._bias = None if bias is None else bias.index_select(0, token_ids)

    @property
    def is_cut(self) -> bool:
        """Whether only the rows of these tokens are computed."""
        return self._rows is not None

    def logits(self, features: torch.Tensor) -> torch.Tensor | None:
        """Returns the logits `(n, K)` of the tokens for features `(n, H)`; `None` if the full head has to run."""
        return None if self._rows is None else nn.functional.linear(features, self._rows, self._bias)

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns logits `(n, V)` in which all other tokens are minus infinity."""
        masked = torch.full_like(logits, -torch.inf)
        masked[:, self.token_ids] = logits[:, self.token_ids]
        return masked


def _is_whole_matrix(lm_head: Any) -> bool:
    return (
        getattr(lm_head, "tp_size", 1) == 1
        and type(getattr(lm_head, "quant_method", None)).__name__.startswith("Unquantized")
        and isinstance(getattr(lm_head, "weight", None), torch.Tensor)
        # If vLLM has packed the weights for its own products, nothing is left here.
        and lm_head.weight.dim() == 2
    )
