"""A target in this process, which continues batches of rows: as some end, others take their places."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ...commands import UserValueError
from ...generation.verification.traits import input_device
from ...internals import CACHE_NAME, sampling_warpers
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
    Writes with a target in this process: whenever rows of a batch end, others take their places.

    Args:
        target: The target.
        batch_size: Rows at a time. It is halved where the device's memory is too small for the batch.
        tokens_per_pass: Tokens of prompts that the target reads at a time, with padding; by default all of a batch.

    Raises:
        ValueError: The batch size is below 1.
    """

    def __init__(self, target: PreTrainedModel, batch_size: int = 32, tokens_per_pass: int | None = None):
        if batch_size < 1:
            raise UserValueError(f"`batch_size` must be at least 1, got {batch_size}.")
        self.target = target.eval()
        self.batch_size = batch_size
        self.tokens_per_pass = tokens_per_pass
        ends = target.generation_config.eos_token_id
        self.ends = frozenset(ends if isinstance(ends, list) else [ends]) - {None}
        # Rows join and leave a cache that holds all their tokens. Elsewhere all rows of a batch end before others.
        self._is_open = all(type(layer) is DynamicLayer for layer in DynamicCache(config=target.config).layers)

    @property
    def made_from(self) -> dict[str, Any]:
        """What the texts depend on: a fingerprint of the target, and its own settings."""
        own = own_settings(self.target.generation_config)
        return {"target": model_fingerprint(self.target), "generation_config": own}

    def run(self, tasks: Iterable[tuple[int, Task]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """
        Yields the numbers and rows of the `tasks` as they end; raises `ValueError` for numbers that are not finite.
        """
        left, running, waiting = iter(tasks), dict[int, Task](), list[_Row]()
        batch, answered = _Batch([], self.target, self._is_open), list[_Row]()
        while True:
            new = dict(islice(left, max(self.batch_size - len(running), 0)))
            running |= new
            if not running:
                return
            completions: dict[int, Any] = dict.fromkeys(new)
            completions |= {row.number: (row.found, row.has_ended) for row in answered}
            for number, completion in completions.items():
                try:
                    waiting.append(_Row(number, running[number].send(completion)))
                except StopIteration as end:
                    del running[number]
                    yield number, end.value
            try:
                answered = self._step(batch, waiting)
            except torch.OutOfMemoryError:
                if self.batch_size == 1:
                    raise
                # Rows begin again where they are, with fewer beside them.
                rows = {row.number: row for row in [*batch.rows, *waiting]}.values()
                answered = [row for row in rows if row.is_done]
                waiting = [row for row in rows if not row.is_done]
                batch = _Batch([], self.target, self._is_open)
                num_rows = min(self.batch_size, len(rows))
                self.batch_size = max(num_rows // 2, 1)
                tqdm.write(f"The device's memory is too small for {num_rows} rows: now {self.batch_size} at a time.")

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answers requests. Raises `ValueError` as [`run`] does."""

        def ask(request: Request) -> Any:
            return (yield request)

        found: dict[int, Any] = dict(self.run((number, ask(request)) for number, request in enumerate(requests)))
        return [found[number] for number in range(len(requests))]

    @torch.inference_mode()
    def _step(self, batch: "_Batch", waiting: list["_Row"]) -> list["_Row"]:
        """Lets rows that wait join the batch, continues it by a piece, and returns the rows that have ended."""
        ended, joined = list[_Row](), set[int]()
        if self._is_open or not batch.rows:
            joining = waiting[: self.batch_size - len(batch.rows)]
            lengths = [len(row.tokens) for row in joining]
            groups = within_budget(range(len(joining)), lengths, self.tokens_per_pass or sys.maxsize)
            for group in groups if self._is_open else groups[:1]:
                new = _Batch([joining[place] for place in group], self.target, self._is_open)
                joined |= {row.number for row in new.rows}
                if self._is_open:
                    ended += self._continue(new, 1)
                batch.join(new)
        ended += self._continue(batch, _NUM_TOKENS)
        waiting[:] = [row for row in waiting if row.number not in joined]
        return ended

    def _continue(self, batch: "_Batch", num_tokens: int) -> list["_Row"]:
        """Continues a batch by a number of tokens, and returns the rows that have ended, which leave it."""
        rows = batch.rows
        if not rows:
            return []
        ends = self.ends.union(*(row.request.ends for row in rows))
        # To the nearest limit of a row: no row is continued beyond its own.
        room = min(row.request.max_new_tokens - len(row.found) for row in rows)
        settings: dict[str, Any] = {"pad_token_id": min(ends, default=0), "eos_token_id": sorted(ends) or None}
        settings |= ONE_ROW_EACH | _IN_PIECES | ({CACHE_NAME: batch.cache} if self._is_open else {})
        output = self.target.generate(
            batch.ids, attention_mask=batch.mask, max_new_tokens=min(room, num_tokens) if self._is_open else room,
            logits_processor=LogitsProcessorList([_Choice(rows, batch.ids.shape[1], self.target)]), **settings,
        )  # fmt: skip
        for row, new in zip(rows, output[:, batch.ids.shape[1] :].tolist(), strict=True):
            row.found += new[: next((index + 1 for index, token in enumerate(new) if token in ends), len(new))]
            row.has_ended = row.found[-1] in ends
        return batch.leave(output)


@dataclass
class _Row:
    number: int
    request: Request
    found: list[int] = field(default_factory=list)
    has_ended: bool = False

    @property
    def tokens(self) -> list[int]:
        """What the target has read or written."""
        return self.request.prompt_ids + self.found

    @property
    def is_done(self) -> bool:
        return self.has_ended or len(self.found) == self.request.max_new_tokens


class _Batch:
    """Rows that are continued together: their tokens, and a cache of all but the last ones, are padded on the left."""

    def __init__(self, rows: Sequence[_Row], target: PreTrainedModel, has_cache: bool):
        self.rows, device = [*rows], input_device(target)
        width = max((len(row.tokens) for row in rows), default=0)
        gaps = [width - len(row.tokens) for row in rows]
        # Padded with tokens of their own: penalties on repetition count them.
        padded = [row.tokens[:1] * gap + row.tokens for gap, row in zip(gaps, rows, strict=True)]
        self.ids = torch.tensor(padded, dtype=torch.long, device=device).view(len(rows), width)
        places = torch.arange(width, device=device)
        self.mask = (places >= torch.tensor(gaps, device=device)[:, None]).long()
        self.cache: Any = DynamicCache(config=target.config) if has_cache else None

    def join(self, new: "_Batch") -> None:
        """Takes the rows of another batch, which has a cache where this one does."""
        if not self.rows:
            self.rows, self.ids, self.mask, self.cache = new.rows, new.ids, new.mask, new.cache
        if not new.rows or self.rows is new.rows:
            return
        width = max(self.ids.shape[1], new.ids.shape[1])
        both = [(batch, width - batch.ids.shape[1]) for batch in (self, new)]
        for number, layer in enumerate(() if self.cache is None else self.cache.layers):
            for name in ("keys", "values"):
                parts = [(getattr(batch.cache.layers[number], name), gap) for batch, gap in both]
                setattr(layer, name, torch.cat([pad(states, (0, 0, gap, 0)) for states, gap in parts]))
        # Masked, so that any token does.
        padded = [torch.cat((batch.ids[:, :1].expand(-1, gap), batch.ids), dim=1) for batch, gap in both]
        self.ids = torch.cat(padded)
        self.mask = torch.cat([pad(batch.mask, (gap, 0)) for batch, gap in both])
        self.rows += new.rows

    def leave(self, output: torch.Tensor) -> list[_Row]:
        """Takes the tokens `(B, L)` that a piece ends with, drops rows that are done, and returns these."""
        done = [row for row in self.rows if row.is_done]
        self.mask = pad(self.mask, (0, output.shape[1] - self.ids.shape[1]), value=1)
        # In the computer's memory: it indexes layers on any device.
        kept = torch.tensor([place for place, row in enumerate(self.rows) if not row.is_done], device="cpu")
        self.rows = [row for row in self.rows if not row.is_done]
        if not self.rows:
            return done
        unused = output.shape[1] - max(len(row.tokens) for row in self.rows)  # columns of padding alone
        self.ids, self.mask = (tensor[kept.to(tensor.device), unused:] for tensor in (output, self.mask))
        if self.cache is not None:
            if done:
                self.cache.batch_select_indices(kept)
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[..., unused:, :], layer.values[..., unused:, :]
        return done


class _Choice(LogitsProcessor):
    """Leaves a sampled row only the token that it draws, with random numbers of its own. Greedy rows stay."""

    def __init__(self, rows: Sequence[_Row], prompt_length: int, target: PreTrainedModel):
        self.prompt_length, self.dtype, device = prompt_length, target.dtype, input_device(target)
        sampled = {place: row for place, row in enumerate(rows) if row.request.sampling is not None}
        self.rows = torch.tensor([*sampled], device=device, dtype=torch.long)
        self.sampling = next((row.request.sampling for row in sampled.values()), None)
        self.numbers = torch.empty(0, device=device)
        if sampled:
            numbers = [_numbers_of(row.request)[len(row.found) :] for row in sampled.values()]
            self.numbers = pad_sequence(numbers, batch_first=True).to(device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns the scores `(B, V)`, in which sampled rows have one finite score each."""
        if scores.isnan().any():
            raise UserValueError(why_not_finite(self.dtype))
        if self.sampling is None:
            return scores
        rows = self.rows.to(scores.device)
        step = input_ids.shape[1] - self.prompt_length
        drawn = draw(scores[rows], self.sampling, self.numbers[:, step].to(scores.device))
        chosen = torch.full_like(scores[rows], float("-inf")).scatter_(1, drawn[:, None], 0.0)
        return scores.index_copy(0, rows, chosen)


def _numbers_of(request: Request) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(request.seed)
    return torch.rand(request.max_new_tokens, generator=generator, device="cpu")


def draw(scores: torch.Tensor, sampling: Sampling, numbers: torch.Tensor) -> torch.Tensor:
    """Returns the tokens `(B,)` that sampling takes from scores `(B, V)` at these random numbers `(B,)` in [0, 1)."""
    tokens = None
    if sampling.further:
        fields = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        warpers = sampling_warpers(scores.device, **fields, **sampling.further)
        ids = torch.zeros(len(scores), 0, dtype=torch.long, device=scores.device)  # which these do not read
        probs = warpers(ids, scores.float()).softmax(dim=-1)
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
