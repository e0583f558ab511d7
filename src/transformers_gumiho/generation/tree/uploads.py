"""Copies small lists from the host to a device without waiting for it."""

from typing import Any

import torch


def upload(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """
    Returns a tensor of numbers on a device.

    `torch.tensor(numbers, device="cuda")` waits until the GPU has finished its earlier work. A copy from pinned memory
    is queued instead.

    Args:
        numbers: A list of numbers, or of such lists.
        device: Device of the tensor.
        dtype: Dtype of the tensor. By default `torch.tensor` chooses it.
    """
    tensor = torch.tensor(numbers, dtype=dtype, device="cpu")
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
