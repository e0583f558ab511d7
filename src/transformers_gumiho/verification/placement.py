"""Where a drafter belongs."""

import torch
from transformers import PreTrainedModel


def drafter_device(target: PreTrainedModel) -> torch.device:
    """
    Returns the device for a drafter of `target`: the target's, or the first one that computes where its first
    parameters are offloaded.
    """
    if target.device.type != "meta":
        return target.device
    places = getattr(target, "hf_device_map", None) or {}
    return next((torch.device(place) for place in places.values() if place != "disk"), torch.device("cpu"))
