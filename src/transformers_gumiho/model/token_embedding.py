"""The token embedding of a drafter: a copy of the target's, or the target's own."""

from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel

from ..commands import UserValueError
from .target_shape import WeightState


class BorrowedEmbedding(nn.Module):
    """
    Stands for an embedding that a drafter was saved without, until [`lend`] sets the target's. That is no parameter:
    it is neither trained nor saved with the drafter.

    Attributes:
        weight (`(V, E)`, *optional*): The embedding after [`lend`].
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight: torch.Tensor | None = None
        # Of the tensor that was lent, where `weight` is a copy of it on another device or in another precision.
        self._copied: WeightState | None = None

    @torch.inference_mode(False)  # or a later training could not read it
    def lend(self, embedding: torch.Tensor | None, vocab_size: int, embedding_size: int, like: torch.Tensor) -> None:
        """
        Takes the rows `(V, E)` of a target's embedding over: themselves where their device and dtype are those of
        `like`, else a copy. Does nothing if it has them, and the target was not updated since.
        """
        if embedding is not None and self._has(embedding, like):
            return
        rows = fitting_rows(embedding, vocab_size, embedding_size)
        # Detached, as a parameter would become one of this module.
        self.weight = rows.detach().to(device=like.device, dtype=like.dtype)
        self._copied = None if embedding is None else _state_of(embedding)

    def _has(self, embedding: torch.Tensor, like: torch.Tensor) -> bool:
        """Whether `weight` is this embedding, or a copy of what it holds now."""
        if self.weight is None or (self.weight.device, self.weight.dtype) != (like.device, like.dtype):
            return False
        is_itself = address_of(self.weight) == address_of(embedding)
        return is_itself or (self._copied is not None and self._copied == _state_of(embedding))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings `(..., E)` of token ids `(...)`."""
        if self.weight is None:
            raise UserValueError(
                "This drafter has no token embedding yet, because it was saved without one. Call "
                "`drafter.share_embedding(target)` first; `generate(assistant_model=...)` does so."
            )
        return nn.functional.embedding(input_ids, self.weight)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # As parameters do, what was lent goes where the drafter is moved.
        if self.weight is not None:
            self.weight = fn(self.weight)
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the drafter, or a pickled one, borrows for itself.
        return self.__dict__ | {"weight": None, "_copied": None}


def embedding_of(target: PreTrainedModel) -> torch.Tensor | None:
    """Returns a target's embedding `(V or more, E)`; `None` where this process has a placeholder of it."""
    weight = getattr(target.get_input_embeddings(), "weight", None)
    return None if weight is None else weight.detach()


def is_split(embedding: torch.Tensor) -> TypeGuard[Any]:
    """Whether a process holds a part of a tensor (a `DTensor`), as with `tp_plan`."""
    # Not by its class: not every build of PyTorch has it.
    return hasattr(embedding, "full_tensor")


def address_of(embedding: torch.Tensor) -> int:
    """Returns the address of a tensor, or of this process's part."""
    return (embedding.to_local() if is_split(embedding) else embedding).data_ptr()


def _state_of(embedding: torch.Tensor) -> WeightState:
    if is_split(embedding):
        # Without a sample: where the processes disagree, some would wait for the others for ever.
        return WeightState.of([embedding.to_local()], is_sampled=False)
    return WeightState.of([embedding])


def share_equal(own: nn.Parameter, other: torch.Tensor | None) -> bool:
    """
    Replaces a drafter's weight by the first rows of the target's, where these are equal, on the same device and in the
    same dtype, so that memory holds them once. Returns whether they are.
    """
    if other is None or is_split(other) or own.device.type == "meta":
        return False
    rows = other.detach()[: own.shape[0]]
    alike = (rows.shape, rows.dtype, rows.device) == (own.shape, own.dtype, own.device)
    if not alike or not torch.equal(rows, own):
        return False
    own.data = rows
    return True


def fitting_rows(embedding: torch.Tensor | None, vocab_size: int, embedding_size: int) -> torch.Tensor:
    """
    Returns the rows `(V, E)` of a target's embedding `(V or more, E)` that belong to a drafter's vocabulary. One that
    is split over processes is gathered, so all of them must call this. Raises `ValueError` where there is none in this
    process, where it is offloaded, and for another shape.
    """
    if embedding is None:
        raise UserValueError(
            "The target's token embedding is not in this process, so a drafter cannot read it. Use a drafter that was "
            "saved with an embedding, or load the target without pipeline stages."
        )
    if embedding.device.type == "meta":
        raise UserValueError(
            "The target's token embedding is offloaded, so a drafter cannot read it. Load the target with a "
            "`device_map` that keeps the embedding on a device."
        )
    if embedding.shape[1] != embedding_size or embedding.shape[0] < vocab_size:
        raise UserValueError(
            f"The target's embedding has shape {tuple(embedding.shape)}, but its config asks for a drafter with "
            f"{(vocab_size, embedding_size)}. Pass `vocab_size`, and `hidden_size` or `embedding_size`, as overrides."
        )
    whole: torch.Tensor = embedding.full_tensor() if is_split(embedding) else embedding
    return whole[:vocab_size]
