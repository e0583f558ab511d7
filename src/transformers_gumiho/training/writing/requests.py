"""What is asked of a target: to continue token ids. Engines answer in this process, or behind a server."""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from ...commands import UserValueError


# Fields of a generation config that cut the distribution, besides those that `Sampling` names.
FURTHER = ("top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_WITHOUT_EFFECT = {"typical_p": 1.0}


@dataclass(frozen=True)
class Sampling:
    """
    How text is sampled: at a `temperature`, from the `top_k` most probable tokens (0: all) and of these from the
    nucleus of probability mass `top_p`. A `share` of the answers is sampled; the others are greedy. `further` holds
    what else the target's generation config says of sampling, such as `min_p`.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    share: float = 0.25
    further: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        are_shares = 0 < self.top_p <= 1 and 0 <= self.share <= 1
        if self.temperature <= 0 or self.top_k < 0 or not are_shares:
            raise UserValueError(
                f"The temperature must be above 0, `top_p` in (0, 1], `top_k` at least 0 and the share in [0, 1], got "
                f"{self}."
            )

    @classmethod
    def of_target(cls, config: GenerationConfig) -> "Sampling":
        """Returns how a target samples by its own config: all answers, or a quarter if it is greedy there."""
        if not config.do_sample:
            return cls()
        own = {name: getattr(config, name, None) for name in FURTHER}
        further = {name: value for name, value in own.items() if value not in (None, _WITHOUT_EFFECT.get(name, 0))}
        return cls(config.temperature or 1.0, config.top_p or 1.0, config.top_k or 0, share=1.0, further=further)


@dataclass(frozen=True)
class Request:
    """
    A text to continue.

    Attributes:
        prompt_ids: What the target reads.
        max_new_tokens: Tokens to write, at most.
        sampling: How they are sampled, `None` for the most probable ones.
        seed: For sampling; of this request alone.
        ends: Further tokens that end the text.
        stop: Words that begin what follows the text, for servers that know no tokens.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    sampling: Sampling | None
    seed: int
    ends: frozenset[int] = frozenset()
    stop: str = ""


Completion = tuple[list[int], bool]  # what the target wrote, with its end, and whether it ended
# Something to write in one or several requests, such as the answers of a conversation; it returns its row. A request
# that a server refuses raises `MalformedRowError` in it.
Task = Generator[Request, Completion, dict[str, Any]]
