"""The target's output head: what turns hidden states, and the drafter's features, into logits."""

from collections.abc import Callable

import torch
from transformers import PreTrainedConfig, PreTrainedModel


def output_head(target: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """
    Returns the function from the target's last hidden states `(..., H)` to its logits `(..., V)`: its output head,
    followed by the scaling and capping that some decoders apply.
    """
    return scaled_head(target.get_output_embeddings(), target.config)


def scaled_head(
    head: Callable[[torch.Tensor], torch.Tensor], target_config: PreTrainedConfig
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns `head` followed by the scaling and capping of logits that the target's config asks for."""
    config = target_config.get_text_config(decoder=True)
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    cap = getattr(config, "final_logit_softcapping", None)

    def logits_of(features: torch.Tensor) -> torch.Tensor:
        logits = head(features)
        if scale != 1:
            logits = logits * scale
        return torch.tanh(logits / cap) * cap if cap else logits

    return logits_of
