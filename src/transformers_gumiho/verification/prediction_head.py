"""The layers between a target's last hidden states and its output projection: mostly none, more in BERT's line."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..internals import without_layer


# Where the layers before the projection stand beside it in the target: in ELECTRA, and in ModernBERT's decoder.
_BESIDE_THE_PROJECTION = ("generator_predictions", "lm_head")


def projected_states(target: PreTrainedModel, last_hidden_states: torch.Tensor) -> Any:
    """
    Returns the input `(..., H)` of the target's output projection. After the decoder of BERT, RoBERTa and ELECTRA
    comes a dense layer with a norm, which may change the width. It runs here, so that the projection alone turns
    states, and a drafter's features, into logits. `last_hidden_states` `(B, T, ...)` are what the decoder returns.
    """
    projection = target.get_output_embeddings()
    parent = next((module for module in target.modules() if any(m is projection for m in module.children())), target)
    if not isinstance(parent, PreTrainedModel):
        # The `forward` of its class: one that was put on the object would run all of the head.
        states = type(parent).forward(without_layer(parent, projection), last_hidden_states)
        return states[0] if isinstance(states, tuple) else states  # XLM's head returns a tuple
    for name in _BESIDE_THE_PROJECTION:
        beside = getattr(parent, name, None)
        if isinstance(beside, nn.Module) and beside is not projection:
            return beside(last_hidden_states)
    return last_hidden_states
