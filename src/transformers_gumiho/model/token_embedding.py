"""The token embedding of a drafter: a copy of the target's, or the target's own."""

from typing import Any

import torch
from torch import nn

from ..user_errors import UserValueError


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
        # The tensor that was lent, of which `weight` may be a copy on another device or in another precision.
        self._source: torch.Tensor | None = None

    def lend(self, weight: torch.Tensor, device: torch.device, dtype: torch.dtype) -> None:
        """Takes `weight` `(V, E)` over: itself where device and dtype are as asked for, else a copy."""
        is_known = self._source is not None and self._source.data_ptr() == weight.data_ptr()
        if is_known and self.weight is not None and (self.weight.device, self.weight.dtype) == (device, dtype):
            return
        self._source = weight.detach()
        self.weight = self._source.to(device=device, dtype=dtype)

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
        return self.__dict__ | {"weight": None, "_source": None}


def fitting_rows(embedding: torch.Tensor, vocab_size: int, embedding_size: int) -> torch.Tensor:
    """
    Returns the rows `(V, E)` of a target's embedding `(V or more, E)` that belong to a drafter's vocabulary.

    Raises:
        ValueError: The embedding is offloaded, or has another shape.
    """
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
    return embedding[:vocab_size]
