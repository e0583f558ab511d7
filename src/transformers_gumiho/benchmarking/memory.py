"""The most memory that something takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class PeakMemory:
    """Set when the measurement has ended; `None` where the system does not report it."""

    num_bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measures the most memory in use at one time beyond what was in use before, on `device`."""
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
    """Makes the peak start from now; returns the bytes resident now, `None` where the system has no such thing."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _resident("VmRSS")
    except OSError:
        return None


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
