"""The settings of prompts and answers that a target writes."""

from dataclasses import dataclass

from ...user_errors import UserValueError
from ..sampling import Sampling


@dataclass(frozen=True)
class SynthesisSettings:
    """
    What is written, and how.

    Attributes:
        num_prompts: Prompts that the target writes.
        batch_size: Prompts or answers that are written at a time.
        max_prompt_tokens: Tokens of a self-written prompt after its opening, at most; a longer one is dropped.
        max_new_tokens: Tokens of an answer, at most; a longer one is cut.
        sampled_share: Share of the answers that are sampled; the others are greedy.
        temperature: For prompts and sampled answers.
        top_p: Probability mass of the nucleus.
        seed: For sampling.
    """

    num_prompts: int
    batch_size: int = 32
    max_prompt_tokens: int = 256
    max_new_tokens: int = 512
    sampled_share: float = 0.25
    temperature: float = 1.0
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UserValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.num_prompts < 0:
            raise UserValueError(f"`num_prompts` must be at least 0, got {self.num_prompts}.")
        if not 0 <= self.sampled_share <= 1:
            raise UserValueError(f"`sampled_share` must be between 0 and 1, got {self.sampled_share}.")
        if self.temperature <= 0 or not 0 < self.top_p <= 1:
            raise UserValueError(
                f"`temperature` must be above 0 and `top_p` in (0, 1], got {self.temperature} and {self.top_p}."
            )

    @property
    def sampling(self) -> Sampling:
        """How prompts are sampled, and the sampled share of the answers."""
        return Sampling(self.temperature, self.top_p, self.sampled_share)
