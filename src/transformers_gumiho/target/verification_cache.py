"""What decoding asks of a target's cache, whatever it holds: keys and values, or states."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..tree.verification import AcceptedPath


class VerificationCache(ABC):
    """
    A target's cache between the prompt and the end of a generation: a pass over a draft tree is on probation until a
    path of it is committed.
    """

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Committed entries of each row."""

    @property
    @abstractmethod
    def argument(self) -> Cache:
        """What a pass of the target reads and writes."""

    @abstractmethod
    def starts(self, device: torch.device) -> int | torch.Tensor:
        """
        Returns the committed entries of each row: `(B, 1)` on `device`, or one number where the host knows that it is
        that of all rows.
        """

    @abstractmethod
    def attention_mask(
        self, visible: torch.Tensor, depths: torch.Tensor, dtype: torch.dtype, window: int | None = None
    ) -> torch.Tensor | None:
        """
        Returns what the nodes of a tree attend to in the next pass, or `None` for the target's own causal mask.

        Args:
            visible (`(B, Q, n)`, bool): Which of the `n` newest entries each of the `Q` nodes sees.
            depths (`(B, n)`): Position of each of the newest entries relative to the first of them.
            dtype: Dtype of the attention scores.
            window (`int`, *optional*): A node sees entries less than this many positions behind it.
        """

    def hides_nothing(self, num_new: int, window: int | None = None) -> bool:
        """
        Returns whether it is known without the device that the nodes of the next pass see all entries: those of a root
        alone, as in a step of plain decoding.

        Args:
            num_new: Nodes of the pass.
            window: As in [`attention_mask`].
        """
        return False

    @abstractmethod
    def commit(self, path: AcceptedPath) -> None:
        """Makes the entries of the accepted nodes permanent, and gives up the others of the newest pass."""

    @abstractmethod
    def truncate(self, num_removed: Sequence[int]) -> None:
        """Gives up the newest `num_removed[b]` committed entries of each row."""

    @abstractmethod
    def restore(self, caller_cache: Any) -> None:
        """Moves the committed entries back to the caller's cache that they came from. The end of this cache."""
