"""What calls keep for a target, beside the model: no copy, checkpoint or parameter list of a target includes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from ...internals import mark_static_address
from ...model.target_shape import WeightState
from ...model.wrappers import as_target


# Kinds of generations (by rows and capacity) whose tensors are kept for a target; the oldest go first.
MAX_KEPT = 2


@dataclass(eq=False)
class Attachment:
    """
    What was attached to a target, for good or in a `with` block: the drafter of its calls, and the drafters that were
    loaded by name, each with the state of its files then.
    """

    drafter: Any = None
    named: dict[str, tuple[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Derived:
    key: tuple[Any, ...]
    weights: WeightState
    tensors: Sequence[torch.Tensor]


@dataclass(eq=False)
class TargetMemory:
    """
    What calls keep for a target, or for its output head. It is freed with that module, so it must not refer to it.

    Attributes:
        attachments: The lasting one, and one for each open block of `attached`, in the order in which they began. The
            last one counts.
        reasons: Why calls decoded plainly, as far as it was logged, without numbers.
        observers: Functions that make the observer of a drafted call.
        was_recorded: Whether a served folder has begun to record, or has tried to.
        verdicts: Of trials, by what was tried: why drafts cannot be verified. The oldest go first.
        derived: Tensors that were computed from weights, by the module that other weights belong to, and by name.
        first_cycles: What the first drafted cycles with a drafter committed.
        static: The tensors of compiled generations that ended, by rows and capacity.
        places: The arguments of `from_pretrained` that said where it is.
        equal_heads: Drafters that came with an output head equal to this one.
    """

    attachments: list[Attachment] = field(default_factory=lambda: [Attachment()])
    reasons: set[str] = field(default_factory=set)
    observers: list[Callable[..., Any]] = field(default_factory=list)
    was_recorded: bool = False
    verdicts: dict[tuple[Any, ...], str | None] = field(default_factory=dict)
    derived: WeakKeyDictionary[nn.Module, dict[str, _Derived]] = field(default_factory=WeakKeyDictionary)
    first_cycles: WeakKeyDictionary[nn.Module, Any] = field(default_factory=WeakKeyDictionary)
    static: dict[tuple[int, int], "StaticMemory"] = field(default_factory=dict)
    places: dict[str, Any] = field(default_factory=dict)
    equal_heads: WeakSet[nn.Module] = field(default_factory=WeakSet)

    @torch.inference_mode(False)  # or calls outside of inference mode could not use the tensors
    @torch.no_grad()
    def derive(
        self,
        name: str,
        owner: nn.Module,
        weights: Sequence[torch.Tensor],
        key: tuple[Any, ...],
        make: Callable[[], Sequence[torch.Tensor]],
    ) -> Sequence[torch.Tensor]:
        """
        Returns the tensors that `make()` computes from `weights`, or the same ones as the last call of this name, if
        it had the same weights and `key`: what they depend on beside the weights (tensors by identity). They are freed
        with `owner`, the module that the weights belong to. Captured graphs may read them where they are.
        """
        of_owner, state = self.derived.setdefault(owner, {}), WeightState.of(weights)
        known = of_owner.get(name)
        if known is None or not _is_same(key, known.key) or state != known.weights:
            of_owner.pop(name, None)  # before the new ones take memory
            known = of_owner[name] = _Derived(key, state, make())
            for tensor in known.tensors:
                mark_static_address(tensor)
        return known.tensors


def _is_same(key: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(key) == len(other) and all(map(_are_same_values, key, other))


def _are_same_values(value: Any, other: Any) -> bool:
    """Tensors are the same only if they are one object."""
    return value is other or (not isinstance(value, torch.Tensor) and value == other)


_memories: WeakKeyDictionary[nn.Module, TargetMemory] = WeakKeyDictionary()


def memory_of(module: nn.Module) -> TargetMemory:
    """Returns what is kept for a target (not for a wrapper of it), or for an output head."""
    return _memories.get(module) or _memories.setdefault(module, TargetMemory())


def place_of(target: Any) -> tuple[str, dict[str, Any]]:
    """Returns the folder or Hub name that a target was loaded from, and the arguments that said where it is."""
    return target.config.name_or_path, memory_of(target).places


def free_memory(target: nn.Module) -> None:
    """
    Frees the memory that calls keep for a target.

    With `cache_implementation="static"` on an accelerator, captured graphs read caches at fixed addresses. The caches
    of up to two kinds of calls (by rows and length) stay until the target is deleted: as much as two static caches. So
    do a draft vocabulary's part of the output head and the tables of transitions. The next call makes anew what it
    needs.

    Args:
        target: The target, or a wrapper of it, as for [`attach`].
    """
    inner = as_target(target)
    memory_of(inner).static.clear()
    if (head := inner.get_output_embeddings()) is not None:
        memory_of(head).derived.clear()


class StaticMemory:
    """
    The tensors of one compiled generation at a time, which captured graphs read where they are. The next generation of
    this kind gets the same ones, if it asks for the same shapes in the same order.
    """

    def __init__(self, batch_size: int, capacity: int):
        self._kind = batch_size, capacity
        self._tensors: list[torch.Tensor] = []
        self._num_used = 0

    @classmethod
    def take(cls, target: nn.Module, batch_size: int, capacity: int) -> "StaticMemory":
        """Returns the memory of an earlier generation of this kind that is not in use, or a new one."""
        return memory_of(target).static.pop((batch_size, capacity), None) or cls(batch_size, capacity)

    @torch.inference_mode(False)  # or the next generation could not write to them outside of inference mode
    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a tensor of zeros."""
        place, self._num_used = self._num_used, self._num_used + 1
        if place < len(self._tensors):
            known = self._tensors[place]
            if (known.shape, known.dtype, known.device) == (torch.Size(shape), dtype, device):
                return known.zero_()
            del self._tensors[place:]
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        mark_static_address(tensor)
        self._tensors.append(tensor)
        return tensor

    @torch.inference_mode(False)
    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor."""
        return self.zeros(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)

    def give_back(self, target: nn.Module) -> None:
        """Hands the tensors to the target's next generation of this kind."""
        del self._tensors[self._num_used :]
        self._num_used = 0
        static = memory_of(target).static
        static[self._kind] = self
        while len(static) > MAX_KEPT:
            static.pop(next(iter(static)), None)
