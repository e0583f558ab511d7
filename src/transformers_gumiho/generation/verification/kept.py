"""Tensors that calls derive from weights: kept while the weights stay the same, and freed with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...internals import mark_static_address, version_of


# Numbers of each weight that are compared, because code that writes to `weight.data` counts no new version.
_NUM_COMPARED = 256


@dataclass(frozen=True)
class _Kept:
    key: tuple[Any, ...]
    versions: list[Any]
    sample: torch.Tensor
    tensors: Sequence[torch.Tensor]


# By the modules that the weights belong to.
_kept: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, dict[str, _Kept]]] = WeakKeyDictionary()


@torch.inference_mode(False)  # or calls outside of inference mode could not use the tensors
@torch.no_grad()
def kept(
    name: str,
    owners: tuple[nn.Module, nn.Module],
    weights: Sequence[torch.Tensor],
    key: tuple[Any, ...],
    make: Callable[[], Sequence[torch.Tensor]],
) -> Sequence[torch.Tensor]:
    """
    Returns the tensors that `make()` returns, or the same ones as the last call of this name, if it had the same key
    and weights.

    Args:
        name: What the tensors are.
        owners: The modules that the weights belong to. The tensors are freed with either.
        weights: What the tensors are computed from.
        key: What they depend on beside the weights. Tensors in it are compared by identity.
        make: Computes the tensors. Captured graphs may read them where they are.
    """
    of_first = _kept.setdefault(owners[0], WeakKeyDictionary())
    of_both = of_first.setdefault(owners[1], {})
    versions = [(weight.data_ptr(), version_of(weight), weight.shape, weight.dtype) for weight in weights]
    sample = _sample(weights)
    known = of_both.get(name)
    is_known = known is not None and versions == known.versions and _is_same(key, known.key)
    if known is None or not is_known or not torch.equal(sample, known.sample):
        of_both.pop(name, None)  # before the new ones take memory
        known = of_both[name] = _Kept(key, versions, sample, make())
        for tensor in known.tensors:
            mark_static_address(tensor)
    return known.tensors


def forget(target: nn.Module) -> None:
    """Frees what was derived from weights of a target, alone or with those of a drafter."""
    modules = set(target.modules())
    for first, of_first in list(_kept.items()):
        for second in list(of_first):
            if first in modules or second in modules:
                del of_first[second]


def _is_same(key: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(key) == len(other) and all(
        a is b or (not isinstance(a, torch.Tensor) and a == b) for a, b in zip(key, other, strict=True)
    )


def _sample(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns some numbers of all weights as one tensor, so that the host waits once for a comparison."""
    parts = [weight.detach().reshape(-1)[:: max(weight.numel() // _NUM_COMPARED, 1)] for weight in weights]
    return torch.cat([part.to(parts[0].device, torch.float32) for part in parts] or [torch.empty(0, device="cpu")])
