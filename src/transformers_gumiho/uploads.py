"""Small lists of the host's, brought to a device without waiting for it."""

from typing import Any

import torch


def upload(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """
    Returns a tensor of numbers on a device.

    `torch.tensor(numbers, device="cuda")` waits until the GPU has done all that it was given before. A copy from
    pinned memory takes its turn instead.

    Args:
        numbers: A list of numbers, or of such lists.
        device: Where the tensor is to be.
        dtype: The tensor's, by default that of `torch.tensor`.
    """
    tensor = torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


__all__ = ["upload"]
