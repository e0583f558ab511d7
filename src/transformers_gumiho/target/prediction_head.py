"""What a target does between its last hidden states and its output projection: mostly nothing, in BERT's line more."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..internals import without_layer


# Where the layers before the projection stand beside it in the target: in ELECTRA, and in ModernBERT's decoder.
_BESIDE_THE_PROJECTION = ("generator_predictions", "lm_head")


def projected_states(target: PreTrainedModel, last_hidden_states: torch.Tensor) -> Any:
    """
    Returns what the target's output projection reads, `(..., H)`, for the last hidden states of its decoder. Behind
    the decoder of BERT, RoBERTa, ELECTRA and their kin is a dense layer with a norm, which may also change the width.
    It is run here, so that the projection alone turns states into logits, and a drafter's features as well.

    Args:
        target: The target.
        last_hidden_states (`(B, T, ...)`): What its decoder returns.
    """
    projection = target.get_output_embeddings()
    parent = next((module for module in target.modules() if any(m is projection for m in module.children())), target)
    if not isinstance(parent, PreTrainedModel):
        # The `forward` of its class: one that was put on the object would run the whole head.
        states = type(parent).forward(without_layer(parent, projection), last_hidden_states)
        return states[0] if isinstance(states, tuple) else states  # XLM's head returns a tuple
    for name in _BESIDE_THE_PROJECTION:
        beside = getattr(parent, name, None)
        if isinstance(beside, nn.Module) and beside is not projection:
            return beside(last_hidden_states)
    return last_hidden_states
