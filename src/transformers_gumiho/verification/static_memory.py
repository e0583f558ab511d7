"""Tensors that compiled generations reuse, as a captured graph reads and writes them at fixed addresses."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..internals import mark_static_address
from ..model.attaching import unwrap_model


# Kinds of generations (by rows and capacity) whose tensors are kept for a target; the oldest go first.
MAX_KEPT = 2

# By the target's embedding, which the copies of a compiled target share.
_kept: WeakKeyDictionary[nn.Module, dict[tuple[int, int], "StaticMemory"]] = WeakKeyDictionary()


def free_memory(target: nn.Module) -> None:
    """
    Frees the memory that compiled generations keep for a target.

    With `cache_implementation="static"` on an accelerator, a captured graph reads caches at fixed addresses. So the
    caches of up to two kinds of calls stay until the target is deleted, about as much as two static caches. The next
    such call allocates them anew, and captures its graphs again.

    Args:
        target: The target, or a wrapper of it, as for [`attach`].
    """
    _kept.pop(unwrap_model(target).get_input_embeddings(), None)


class StaticMemory:
    """
    The tensors of one generation at a time. The next generation with as many rows and slots gets the same ones, if it
    asks for the same shapes in the same order.
    """

    def __init__(self, batch_size: int, capacity: int):
        self._kind = batch_size, capacity
        self._tensors: list[torch.Tensor] = []
        self._num_used = 0

    @classmethod
    def take(cls, target: PreTrainedModel, batch_size: int, capacity: int) -> "StaticMemory":
        """Returns the memory of an earlier generation of this kind that no other one uses now, or a new one."""
        kept = _kept.get(target.get_input_embeddings(), {}).pop((batch_size, capacity), None)
        return cls(batch_size, capacity) if kept is None else kept

    @torch.inference_mode(False)  # or the next generation could not write to them outside of inference mode
    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a tensor of zeros."""
        place, self._num_used = self._num_used, self._num_used + 1
        if place < len(self._tensors):
            kept = self._tensors[place]
            if (kept.shape, kept.dtype, kept.device) == (torch.Size(shape), dtype, device):
                return kept.zero_()
            del self._tensors[place:]
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        mark_static_address(tensor)
        self._tensors.append(tensor)
        return tensor

    @torch.inference_mode(False)
    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor."""
        return self.zeros(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)

    def give_back(self, target: PreTrainedModel) -> None:
        """Hands the tensors to the target's next generation of this kind."""
        del self._tensors[self._num_used :]
        self._num_used = 0
        kept = _kept.setdefault(target.get_input_embeddings(), {})
        kept[self._kind] = self
        while len(kept) > MAX_KEPT:
            kept.pop(next(iter(kept)), None)
