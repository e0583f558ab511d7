"""Serial layers that begin as the last layers of the target."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging


logger = logging.get_logger(__name__)


@torch.no_grad()
def copy_last_layers(target: PreTrainedModel, layers: nn.ModuleList) -> None:
    """
    Copies the target's last layers into those of a serial head, as many as it has.

    Args:
        target: A target whose layers have the parameters of a Llama's, under the same names and in the same shapes.
            Those that a serial layer has no place for are left out, and the log names them.
        layers: The layers of the serial head.

    Raises:
        ValueError: The target's layers are fewer or others, or offloaded or quantised.
    """
    name, found = type(target).__name__, getattr(target.get_decoder(), "layers", None)
    if not isinstance(found, nn.ModuleList) or len(found) < len(layers):
        raise ValueError(
            f"Layers are copied from a target with at least {len(layers)} of them in a `layers` list, and {name} has "
            f"{len(found) if isinstance(found, nn.ModuleList) else 'none'}. Leave `copy_layers` out."
        )
    left_out: set[str] = set()
    for own, given in zip(layers, list(found)[-len(layers) :], strict=True):
        parameters = dict(given.named_parameters())
        for parameter_name, parameter in own.named_parameters():
            source = parameters.pop(parameter_name, None)
            if source is None or source.shape != parameter.shape or not _is_plain(source):
                kind = "no such parameter"
                if source is not None:
                    kind = f"one of {tuple(source.shape)} in {source.dtype} on {source.device}"
                raise ValueError(
                    f"The serial layers have a `{parameter_name}` of shape {tuple(parameter.shape)}, and those of "
                    f"{name} {kind}. Leave `copy_layers` out, or load the target whole and not quantised."
                )
            parameter.copy_(source)
        left_out |= set(parameters)
    if left_out := left_out - {"input_layernorm.weight"}:
        logger.warning(
            f"Copying layers of {name} leaves out what a serial layer lacks: {', '.join(sorted(left_out))}."
        )


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether it holds plain numbers."""
    is_tensor = type(parameter.data) is torch.Tensor and parameter.device.type != "meta"
    return is_tensor and parameter.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)


__all__ = ["copy_last_layers"]
