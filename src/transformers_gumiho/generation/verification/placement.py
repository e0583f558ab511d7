"""The devices of a target and its drafter."""

import torch
from transformers import PreTrainedModel

from ...internals import execution_device


def input_device(target: PreTrainedModel) -> torch.device:
    """
    Returns the device for a target's inputs: its own, or the one that computes if its first parameters are offloaded.
    """
    return target.device if target.device.type != "meta" else execution_device(target) or torch.device("cpu")


def drafter_device(target: PreTrainedModel) -> torch.device:
    """
    Returns the device for a drafter: that of the target's output head, which the drafter runs several times per cycle.
    If the head is offloaded, it is that of the inputs.
    """
    head = target.get_output_embeddings()
    weight = None if head is None else next(head.parameters(), None)
    return input_device(target) if weight is None or weight.is_meta else weight.device


def accelerators_of(*models: PreTrainedModel) -> list[torch.device]:
    """Returns the devices other than the CPU that hold parts of the models, each once."""
    places = [place for model in models for place in (getattr(model, "hf_device_map", None) or {}).values()]
    devices = [torch.device(place) for place in places if place != "disk"] + [input_device(model) for model in models]
    return [device for device in dict.fromkeys(devices) if device.type != "cpu"]
