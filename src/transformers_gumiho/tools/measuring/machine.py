"""The machine on which models run: its name, and the memory that a block of code takes."""

import functools
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...generation.verification.placement import input_device


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


def accelerators_of(*models: PreTrainedModel) -> list[torch.device]:
    """Returns the devices other than the CPU that hold parts of the models, each once."""
    places = [place for model in models for place in (getattr(model, "hf_device_map", None) or {}).values()]
    devices = [torch.device(place) for place in places if place != "disk"] + [input_device(model) for model in models]
    return [device for device in dict.fromkeys(devices) if device.type != "cpu"]


@dataclass
class PeakMemory:
    """Bytes, set when the measurement has ended; `None` if the system does not report them."""

    num_bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measures the peak of the memory on `device` within a `with` block, beyond the memory in use before."""
    peak = PeakMemory()
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        yield peak
        peak.num_bytes = torch.accelerator.max_memory_allocated(device) - before
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _resident("VmRSS")
    except OSError:
        yield peak
        return
    yield peak
    peak.num_bytes = max(_resident("VmHWM") - before, 0)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
