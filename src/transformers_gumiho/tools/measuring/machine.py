"""The machine on which models run: its name, and the memory that code takes."""

import functools
import platform
import re
from collections.abc import Callable
from pathlib import Path

import torch


def machine_name(device: torch.device) -> str:
    """Returns the name of a device. A CPU's name includes the number of threads, on which its speed depends."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type


@functools.cache
def _processor() -> str:
    path = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*: (.+)", path.read_text(encoding="utf-8"), re.M) if path.is_file() else None
    return name[1] if name else platform.processor() or platform.machine()


def watch_memory(device: torch.device) -> Callable[[], int | None]:
    """
    Returns a function that returns the peak of the memory on `device` from now on, beyond the memory in use now, in
    bytes; `None` if the system does not report it.
    """
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        return lambda: torch.accelerator.max_memory_allocated(device) - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        return lambda: None
    before = _resident("VmRSS")
    return lambda: max(_resident("VmHWM") - before, 0)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
