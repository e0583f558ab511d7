"""What the machine is called that models run on."""

import functools
import platform
from pathlib import Path

import torch
from transformers import PreTrainedModel


def machine_and_dtype(target: PreTrainedModel) -> tuple[str, str]:
    """Returns what a table of costs is measured on, and holds for: the target's machine and its dtype."""
    return machine_name(target.device), str(target.dtype).removeprefix("torch.")


def machine_name(device: torch.device) -> str:
    """Returns the name of the device, of a processor with the number of threads: how fast it is depends on both."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"{_processor()}, {torch.get_num_threads()} threads"


@functools.cache
def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


__all__ = ["machine_and_dtype", "machine_name"]
