"""Peak memory of a block of code."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class PeakMemory:
    """Bytes, set when the measurement has ended; `None` if the system does not report them."""

    num_bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measures the peak of the memory on `device` within a `with` block, beyond the memory in use before."""
    peak = PeakMemory()
    if device.type == "cpu":
        before = _reset_resident_peak()
        yield peak
        if before is not None:
            peak.num_bytes = max(_resident("VmHWM") - before, 0)
        return
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    yield peak
    peak.num_bytes = torch.accelerator.max_memory_allocated(device) - before


def _reset_resident_peak() -> int | None:
    """Resets the peak; returns the bytes that are resident now, or `None` if the system does not report them."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _resident("VmRSS")
    except OSError:
        return None


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
