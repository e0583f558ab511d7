"""The pairs that have a short name."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...commands import UserFileNotFoundError, UserValueError
from . import smollm2


_REPOSITORY = "https://github.com/transformers-gumiho/transformers-gumiho"


@dataclass(frozen=True)
class Pair:
    """
    A target and the drafter that was trained for it.

    Attributes:
        folder: Its folder in the folder `examples` of the repository. It holds the drafter.
        make_target: Returns the target's folder or its name on the Hub. By default the target is beside the drafter.
        in_bfloat16: Whether a CPU that computes in bfloat16 runs it in bfloat16: whether reading weights takes most of
            its time.
    """

    folder: str
    make_target: Callable[[], str] | None = None
    in_bfloat16: bool = False

    @property
    def cpu_dtype(self) -> str:
        """The precision in which a CPU runs it. Other devices use the precision of its files."""
        # Older releases of PyTorch do not report what a CPU computes in.
        capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        in_bfloat16 = any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
        return "bfloat16" if self.in_bfloat16 and in_bfloat16 else "float32"

    def find_drafter(self) -> str:
        """Returns the drafter's folder. Raises `FileNotFoundError` where there is no clone of the repository."""
        return self._find("gumiho")

    def find_target(self) -> str:
        """Returns the target's folder, which is created if necessary, or its name on the Hub."""
        return self._find("target") if self.make_target is None else self.make_target()

    def _find(self, model: str) -> str:
        name = f"{self.folder}/{model}"
        for folder in (Path(__file__).parents[4] / "examples" / name, Path("examples", name)):
            if (folder / "config.json").exists():
                return str(folder)
        raise UserFileNotFoundError(
            f"There is no folder examples/{name} here, which this pair needs. Run this in a clone of "
            f"{_REPOSITORY}, or specify --target and --assistant."
        )


PAIRS = {
    "demo": Pair("demo_pair"),
    "smollm2": Pair("smollm2", smollm2.find_target, in_bfloat16=True),
}


def find_pair(name: str) -> Pair:
    """
    Returns the pair of a short name.

    Raises:
        ValueError: No pair has this name.
    """
    if name not in PAIRS:
        known = " or ".join(f"--pair {name}" for name in PAIRS)
        raise UserValueError(f"There is no pair {name!r}. Specify {known}, or both --target and --assistant.")
    return PAIRS[name]
