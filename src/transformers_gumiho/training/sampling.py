"""How text is sampled: from the most probable tokens, without sorting the vocabulary."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TopPLogitsWarper


# Most nuclei have fewer tokens. Sorting a large vocabulary in each step costs as much as a small target.
_NUM_CANDIDATES = 256


@dataclass(frozen=True)
class Sampling:
    """
    How text is sampled: at a `temperature`, from the nucleus of probability mass `top_p` in (0, 1]. A `share` of the
    batches is sampled; the others are greedy.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    share: float = 1.0

    def samples(self, batch: int) -> bool:
        """Whether a batch is sampled. Sampled batches are spread evenly."""
        return int((batch + 1) * self.share) > int(batch * self.share)

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """The arguments of `generate()`: the [`Nucleus`] takes the place of its own warpers."""
        processors = LogitsProcessorList([Nucleus(self)])
        return {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "logits_processor": processors}


class Nucleus(LogitsProcessor):
    """Divides the scores `(B, V)` by a temperature, and keeps the nucleus, as transformers' own top-p does."""

    def __init__(self, sampling: Sampling):
        self.temperature, self.top_p = sampling.temperature, sampling.top_p
        self._sorting = TopPLogitsWarper(sampling.top_p)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns the scores, those of tokens outside the nucleus minus infinity."""
        scores = scores / self.temperature
        if self.top_p >= 1:
            return scores
        probs = scores.float().softmax(dim=-1)
        best = probs.topk(min(_NUM_CANDIDATES, probs.shape[-1]), dim=-1).values
        above = best.cumsum(dim=-1) - best
        least = best.masked_fill(above >= self.top_p, 1.0).min(dim=-1, keepdim=True).values
        kept = scores.masked_fill(probs < least, float("-inf"))
        wide = best.sum(dim=-1) < self.top_p
        if wide.any():
            kept[wide] = self._sorting(input_ids, scores[wide])
        return kept
