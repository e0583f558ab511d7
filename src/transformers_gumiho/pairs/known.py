"""The pairs that have a short name."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..user_errors import UserFileNotFoundError, UserValueError
from . import smollm2


_REPOSITORY = "https://github.com/transformers-gumiho/transformers-gumiho"


@dataclass(frozen=True)
class Pair:
    """
    A target and the drafter that was trained for it.

    Attributes:
        name: The name of the pair on a command line.
        drafter: The drafter's folder, in the folder `examples` of the repository.
        target: The target's folder, in the same folder, or a function that returns its folder or its name on the
            Hub. The function is given `report`, which it calls with a line before anything slow.
        in_bfloat16: Whether a CPU that computes in bfloat16 runs it in bfloat16: whether reading weights takes most of
            its time.
    """

    name: str
    drafter: str
    target: str | Callable[[Callable[[str], None]], str]
    in_bfloat16: bool = False

    @property
    def cpu_dtype(self) -> str:
        """The precision in which a CPU runs it. Other devices use the precision of its files."""
        return "bfloat16" if self.in_bfloat16 and cpu_computes_bfloat16() else "float32"

    def find_drafter(self) -> str:
        """Returns the drafter's folder. Raises `FileNotFoundError` where there is no clone of the repository."""
        return self._find(self.drafter)

    def find_target(self, report: Callable[[str], None]) -> str:
        """Returns the target's folder, which is created if necessary, or its name on the Hub."""
        return self._find(self.target) if isinstance(self.target, str) else self.target(report)

    def _find(self, name: str) -> str:
        for folder in (Path(__file__).parents[3] / "examples" / name, Path("examples", name)):
            if (folder / "config.json").exists():
                return str(folder)
        raise UserFileNotFoundError(
            f"There is no folder examples/{name} here, which --pair {self.name} needs. Run this in a clone of "
            f"{_REPOSITORY}, or specify --target and --assistant."
        )


def cpu_computes_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16. Older releases of PyTorch do not report it."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


PAIRS = {
    "demo": Pair("demo", drafter="demo_pair/gumiho", target="demo_pair/target"),
    "smollm2": Pair("smollm2", drafter="smollm2/gumiho", target=smollm2.find_target, in_bfloat16=True),
}


def find_pair(name: str) -> Pair:
    """
    Returns the pair of a short name.

    Raises:
        ValueError: No pair has this name.
    """
    if name not in PAIRS:
        known = " or ".join(f"--pair {known}" for known in PAIRS)
        raise UserValueError(f"There is no pair {name!r}. Specify {known}, or both --target and --assistant.")
    return PAIRS[name]
