"""A target in this process, which continues batches of prompts: rows leave a batch as they end."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ...commands import UserValueError
from ...generation.verification.traits import input_device
from ...internals import CACHE_NAME
from ..data.budget import within_budget
from ..data.fingerprint import VOLATILE, model_fingerprint
from ..data.target_runs import ONE_ROW_EACH, why_not_finite
from .requests import FURTHER, Completion, Request, Sampling, Task


# Tokens after which ended rows leave. A batch of 32 answers of SmolLM2 then takes 1% more passes x rows than if they
# left at once, and 35% more if none leaves.
_NUM_TOKENS = 32
# Most nuclei have fewer tokens. Sorting a large vocabulary in each step costs as much as a small target.
_NUM_CANDIDATES = 256
# Further ones, so that nothing depends on where a row is padded or a piece of it begins.
_IN_PIECES: dict[str, Any] = {
    "do_sample": False, "min_new_tokens": None, "max_time": None, "cache_implementation": None, "min_length": 0,
    "forced_eos_token_id": None, "begin_suppress_tokens": None, "exponential_decay_length_penalty": None,
}  # fmt: skip
# Fields of a target's generation config that do not decide what it writes, or that `Sampling` and requests hold.
_NOT_ITS_OWN = {
    *ONE_ROW_EACH, *_IN_PIECES, *VOLATILE, *FURTHER, "_from_model_config", "temperature", "top_p", "top_k",
    "max_length", "max_new_tokens", "pad_token_id",
}  # fmt: skip


def own_settings(config: GenerationConfig) -> dict[str, Any]:
    """Returns what a target's generation config adds to how it writes: ends, penalties, tokens that are suppressed."""
    return {name: value for name, value in json.loads(config.to_json_string()).items() if name not in _NOT_ITS_OWN}


class LocalEngine:
    """
    Writes with a target in this process.

    Args:
        target: The target.
        batch_size: Tasks at a time.
        tokens_per_pass: Tokens of prompts that the target reads at a time, with padding; by default all of a batch.

    Raises:
        ValueError: The batch size is below 1.
    """

    def __init__(self, target: PreTrainedModel, batch_size: int = 32, tokens_per_pass: int | None = None):
        if batch_size < 1:
            raise UserValueError(f"`batch_size` must be at least 1, got {batch_size}.")
        self.target, self.batch_size, self.tokens_per_pass = target.eval(), batch_size, tokens_per_pass
        ends = target.generation_config.eos_token_id
        self.ends = frozenset(ends if isinstance(ends, list) else [ends]) - {None}

    @property
    def made_from(self) -> dict[str, Any]:
        """What the texts depend on: a fingerprint of the target, and its own settings."""
        own = own_settings(self.target.generation_config)
        return {"target": model_fingerprint(self.target), "generation_config": own}

    def run(self, tasks: Iterable[tuple[int, Task]], is_proven: bool = True) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the numbers and rows of the `tasks`, one batch, as they end; `is_proven` is for servers."""
        running = dict(tasks)
        completions: dict[int, Any] = dict.fromkeys(running)
        while completions:
            requests: dict[int, Request] = {}
            for number, completion in completions.items():
                try:
                    requests[number] = running[number].send(completion)
                except StopIteration as end:
                    yield number, end.value
            completions = dict(zip(requests, self.complete(list(requests.values())), strict=True))

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answers requests, as many at a time as `tokens_per_pass` allows. Raises `ValueError` as [`run`] does."""
        lengths = [len(request.prompt_ids) for request in requests]
        found: dict[int, Completion] = {}
        for group in within_budget(range(len(requests)), lengths, self.tokens_per_pass or sys.maxsize):
            found |= zip(group, self._complete([requests[number] for number in group]), strict=True)
        return [found[number] for number in range(len(requests))]

    @torch.inference_mode()
    def _complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answers requests as one batch. Raises `ValueError` if what the target computes is not finite."""
        ends, device = self.ends.union(*(request.ends for request in requests)), input_device(self.target)
        padding, longest = min(ends, default=0), max((len(request.prompt_ids) for request in requests), default=0)
        gaps = [longest - len(request.prompt_ids) for request in requests]
        # Padded with tokens of their own: penalties on repetition count them.
        prompts = [r.prompt_ids[:1] * gap + r.prompt_ids for gap, r in zip(gaps, requests, strict=True)]
        ids, places = torch.tensor(prompts, device=device), torch.arange(longest, device=device)
        mask = (places >= torch.tensor(gaps, device=device)[:, None]).long()
        cache = DynamicCache(config=self.target.config)
        rows_leave = all(type(layer) is DynamicLayer for layer in cache.layers)
        settings = ONE_ROW_EACH | _IN_PIECES | {"pad_token_id": padding, "eos_token_id": sorted(ends) or None}
        settings |= {CACHE_NAME: cache} if rows_leave else {}
        found: list[list[int]] = [[] for _ in requests]
        rows = list(range(len(requests)))
        while rows:
            # To the nearest limit of a row: no row is continued beyond its own.
            room = min(requests[row].max_new_tokens - len(found[row]) for row in rows)
            choice = _Choice([requests[row] for row in rows], longest, self.target)
            output = self.target.generate(
                ids, attention_mask=mask, max_new_tokens=min(room, _NUM_TOKENS) if rows_leave else room,
                logits_processor=LogitsProcessorList([choice]), **settings,
            )  # fmt: skip
            for row, new in zip(rows, output[:, ids.shape[1] :].tolist(), strict=True):
                found[row] += new[: next((index + 1 for index, token in enumerate(new) if token in ends), len(new))]
            is_open = [found[r][-1] not in ends and len(found[r]) < requests[r].max_new_tokens for r in rows]
            # In the computer's memory: it indexes layers on any device.
            kept = torch.tensor(is_open, device="cpu").nonzero()[:, 0]
            if rows_leave and len(kept):
                cache.batch_select_indices(kept)
            mask = pad(mask, (0, output.shape[1] - ids.shape[1]), value=1)[kept.to(device)]
            ids, rows = output[kept.to(output.device)], [rows[index] for index in kept.tolist()]
        return [(new, new[-1] in ends) for new in found]


class _Choice(LogitsProcessor):
    """
    Leaves a sampled row only the token that it draws. Each row draws with random numbers of its own, so that it does
    not depend on what lies beside it; that takes half a millisecond for 32 steps of 32 rows. Greedy rows stay as they
    are.
    """

    def __init__(self, requests: Sequence[Request], prompt_length: int, target: PreTrainedModel):
        self.prompt_length, self.dtype, device = prompt_length, target.dtype, input_device(target)
        sampled = {row: request for row, request in enumerate(requests) if request.sampling is not None}
        self.rows = torch.tensor([*sampled], device=device, dtype=torch.long)
        self.sampling = next((request.sampling for request in sampled.values()), None)
        numbers = [
            torch.rand(
                request.max_new_tokens, generator=torch.Generator("cpu").manual_seed(request.seed), device="cpu"
            )
            for request in sampled.values()
        ]
        self.numbers = pad_sequence(numbers, batch_first=True).to(device) if numbers else torch.empty(0, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns the scores `(B, V)`, in which sampled rows have one finite score each."""
        if scores.isnan().any():
            raise UserValueError(why_not_finite(self.dtype))
        if self.sampling is None:
            return scores
        rows, step = self.rows.to(scores.device), input_ids.shape[1] - self.prompt_length
        drawn = draw(scores[rows], self.sampling, self.numbers[:, step].to(scores.device))
        chosen = torch.full_like(scores[rows], float("-inf")).scatter_(1, drawn[:, None], 0.0)
        return scores.index_copy(0, rows, chosen)


def draw(scores: torch.Tensor, sampling: Sampling, numbers: torch.Tensor) -> torch.Tensor:
    """Returns the tokens `(B,)` that sampling takes from scores `(B, V)` at these random numbers `(B,)` in [0, 1)."""
    tokens = None
    if sampling.further:
        probs = _warped(scores.float(), sampling).softmax(dim=-1)
    else:
        probs = (scores.float() / sampling.temperature).softmax(dim=-1)
    if not sampling.further and (sampling.top_k or sampling.top_p < 1):
        # The most probable tokens, from which the nucleus is cut; a wide one takes all tokens.
        full, num_candidates = probs, min(sampling.top_k or _NUM_CANDIDATES, probs.shape[-1])
        probs, tokens = full.topk(num_candidates, dim=-1)
        if not sampling.top_k and (probs.sum(dim=-1) < sampling.top_p).any():
            probs, tokens = full.sort(dim=-1, descending=True)
        before = probs.cumsum(dim=-1) - probs
        total = probs.sum(dim=-1, keepdim=True) if sampling.top_k else 1.0
        probs = probs.masked_fill(before >= sampling.top_p * total, 0.0)
    reached = probs.cumsum(dim=-1)
    places = (reached <= numbers[:, None] * reached[:, -1:]).sum(dim=-1)
    places = places.clamp(max=probs.shape[-1] - 1)[:, None]
    return (places if tokens is None else tokens.gather(1, places))[:, 0]


def _warped(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Returns scores `(B, V)` as all of a target's warpers leave them, in the order of `generate()`."""
    further, device = sampling.further, scores.device
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if "top_h" in further:
        warpers.append(TopHLogitsWarper(top_h=further["top_h"]))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(top_k=sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(top_p=sampling.top_p))
    if "min_p" in further:
        warpers.append(MinPLogitsWarper(min_p=further["min_p"]))
    if "typical_p" in further:
        warpers.append(TypicalLogitsWarper(mass=further["typical_p"]))
    if "epsilon_cutoff" in further:
        warpers.append(EpsilonLogitsWarper(epsilon=further["epsilon_cutoff"]))
    if "eta_cutoff" in further:
        warpers.append(EtaLogitsWarper(epsilon=further["eta_cutoff"], device=str(device)))
    ids = torch.zeros(len(scores), 0, dtype=torch.long, device=device)  # which these do not read
    return torch.as_tensor(warpers(ids, scores))
