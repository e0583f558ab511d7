"""What a block drafter has beside the layers of other drafters: keys and values of the target's states, and pairs."""

from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def context_entries(
    attention: Any, context: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the keys and values `(B, heads, n, head_dim)` of the target's states in the cache of a layer.

    Args:
        attention: The attention of the layer.
        context (`(B, n, H)`): What `read_target` returned: the same for every layer, without its input norm.
        cos, sin (`(B, n, head_dim)`): The rotary embedding of the states' own positions.
    """
    shape = (*context.shape[:2], -1, attention.head_dim)
    keys = attention.k_proj(context).view(shape)
    if (norm := getattr(attention, "k_norm", None)) is not None:
        keys = norm(keys)
    keys = keys.transpose(1, 2)
    keys, _ = apply_rotary_pos_emb(keys, keys, cos, sin)
    values = attention.v_proj(context).view(shape).transpose(1, 2)
    return keys, values


class MarkovHead(nn.Module):
    """
    The Markov head of DSpark: `w2[b] @ w1[a]` is added to the logit of token b where the token above is a. It has rows
    of `w1` for all tokens, and rows of `w2` for those that an output head scores.
    """

    def __init__(self, vocab_size: int, num_scored: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Embedding(num_scored, rank)
