"""Serial layers that begin as the last layers of the target."""

import torch
from torch import nn
from transformers import PreTrainedModel


@torch.no_grad()
def copy_last_layers(target: PreTrainedModel, layers: nn.ModuleList) -> None:
    """
    Copies the target's last layers into those of a serial head, as many as it has.

    Args:
        target: A target whose layers have the parameters of a Llama's, under the same names and in the same shapes.
            Those that a serial head has no place for (the norm before its first layer) are left out.
        layers: The layers of the serial head.

    Raises:
        ValueError: The target's layers are fewer or others, or offloaded.
    """
    name, found = type(target).__name__, getattr(target.get_decoder(), "layers", None)
    if not isinstance(found, nn.ModuleList) or len(found) < len(layers):
        raise ValueError(
            f"Layers are copied from a target with at least {len(layers)} of them in a `layers` list, and {name} has "
            f"{len(found) if isinstance(found, nn.ModuleList) else 'none'}. Leave `copy_layers` out."
        )
    for own, given in zip(layers, list(found)[-len(layers) :], strict=True):
        parameters = dict(given.named_parameters())
        for parameter_name, parameter in own.named_parameters():
            source = parameters.get(parameter_name)
            if source is None or source.shape != parameter.shape or source.device.type == "meta":
                has = "no such parameter" if source is None else f"one of {tuple(source.shape)} on {source.device}"
                raise ValueError(
                    f"The serial layers have a `{parameter_name}` of shape {tuple(parameter.shape)}, and those of "
                    f"{name} {has}. Leave `copy_layers` out."
                )
            parameter.copy_(source)


__all__ = ["copy_last_layers"]
