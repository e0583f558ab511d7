"""The number of tokens that a drafter drafts in vLLM, where a draft is a chain."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ChainParts:
    """
    The parts of a chain of `num_tokens` tokens.

    Attributes:
        num_serial_tokens: Tokens from the serial head, one pass each.
        num_heads: Tokens from the parallel heads, all in one pass.
    """

    num_serial_tokens: int
    num_heads: int

    @property
    def num_tokens(self) -> int:
        return self.num_serial_tokens + self.num_heads

    def __str__(self) -> str:
        serial, heads = self.num_serial_tokens, self.num_heads
        return f"{self.num_tokens} tokens per step ({serial} from the serial head, {heads} from parallel heads)"

    @classmethod
    def of_drafter(cls, config: Any, num_tokens: int) -> "ChainParts":
        """
        Args:
            config: A drafter's config. Only `num_serial_tokens` and `num_parallel_heads` are read.
            num_tokens: vLLM's `num_speculative_tokens`.

        Raises:
            ValueError: The drafter drafts fewer tokens.
        """
        longest = config.num_serial_tokens + config.num_parallel_heads
        if num_tokens > longest:
            raise ValueError(
                f"`num_speculative_tokens` is {num_tokens}, but this Gumiho drafter drafts at most {longest} tokens: "
                f"{config.num_serial_tokens} serial ones and one for each of its {config.num_parallel_heads} parallel "
                f"heads. Ask for {longest} or fewer."
            )
        serial = min(num_tokens, config.num_serial_tokens)
        return cls(serial, num_tokens - serial)
