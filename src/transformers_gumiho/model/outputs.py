"""What a drafter returns."""

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput


@dataclass
class GumihoOutput(ModelOutput):
    """
    Output of [`GumihoModel`]. `B` batch size, `T` tokens, `H` hidden size, `S` serial tokens, `P` parallel heads. For
    EAGLE-3, the predictions are not of the target's states, but of what the drafter's own output head reads.

    Args:
        serial_features (`torch.Tensor` of shape `(B, T, H)`):
            At position t, the prediction of the target's hidden state t+1. The target's output head turns it into the
            distribution of the token after `input_ids[:, t]`.
        parallel_features (`torch.Tensor` of shape `(B, P, max(T - S, 0), H)`):
            For head i at position t, the prediction of the target's hidden state t+1+S+i, made from the tokens
            `input_ids[:, t + 1 : t + 1 + S]` and the features that predict them. Transitions move it by the token
            `input_ids[:, t + S + i]`.
        unrolled_features (`tuple[torch.Tensor]`, *optional*, with `unroll`):
            For each serial token j = 1..S-1 beyond the first, `(B, T - j, H)`: at position t, the prediction of the
            target's state t+1+j, made from the serial head's own feature.
        cache (`Cache`, *optional*):
            The keys and values of the serial head, with `use_cache=True`.
        hidden_states (`tuple[torch.Tensor]`, *optional*):
            Input of the serial head and output of each of its layers, each `(B, T, H)`.
        attentions (`tuple[torch.Tensor]`, *optional*):
            Attention weights of each layer, each `(B, heads, T, keys)`.
    """

    serial_features: torch.Tensor | None = None
    parallel_features: torch.Tensor | None = None
    unrolled_features: tuple[torch.Tensor, ...] | None = None
    cache: Cache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
