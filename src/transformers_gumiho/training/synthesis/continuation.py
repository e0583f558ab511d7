"""Continuing a batch of prompts: rows leave it as they end, and what all prompts begin with is computed once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from ...internals import CACHE_NAME
from ...target.feature_reader import find_decoder
from ...target.placement import drafter_device
from ...target.prediction_head import projected_states
from ..target_features import OnlineFeatures, stored_states, why_not_finite
from .nucleus import sample_nucleus
from .roomy_cache import attends_everywhere, make_roomy_cache


# Rows that ended are cut off when they are this share of the batch: cutting copies the cache.
_ENDED_SHARE = 1 / 8


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen where they are sampled."""

    temperature: float = 1.0
    top_p: float = 0.95


@dataclass
class Continuation:
    """
    What follows one prompt.

    Attributes:
        tokens: Token ids, with the end where there is one.
        ended: Whether the target ended it, rather than the limit.
        states (`(T, H)`): The target's last hidden states of the prompt and the tokens, if kept.
    """

    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    states: torch.Tensor | None = None


class BatchContinuation:
    """
    Continues batches of prompts with a target.

    Args:
        target: The target.
        ends: Tokens that end a continuation.
        sampling: How tokens are sampled.
        states_dtype: Where given, the target's last hidden states are kept in it.
    """

    def __init__(
        self, target: PreTrainedModel, ends: set[int], sampling: Sampling, states_dtype: torch.dtype | None = None
    ):
        self.target = target.eval()
        self.decoder, self.features = find_decoder(target), OnlineFeatures(target)
        self.ends, self.sampling, self.states_dtype = ends, sampling, states_dtype

    @torch.inference_mode()
    def __call__(
        self, prompts: Sequence[list[int]], max_new_tokens: int, sampled: Sequence[bool], seed: int
    ) -> list[Continuation]:
        """
        Continues each prompt until it ends or has `max_new_tokens` more.

        Args:
            prompts: Token ids, at least one each.
            max_new_tokens: Tokens to add, at most.
            sampled: For each prompt, whether to sample or to take the most probable token.
            seed: For sampling.
        """
        batch = _Batch(self, prompts, sampled, seed)
        states = batch.read_prompts()
        for _ in range(max_new_tokens):
            batch.add_tokens(states)
            if not batch.compact():
                break
            states = batch.step()
        return batch.finish()


class _Batch:
    """The rows of a batch that have not ended."""

    def __init__(
        self, continuing: BatchContinuation, prompts: Sequence[list[int]], sampled: Sequence[bool], seed: int
    ):
        self.continuing, self.prompts = continuing, prompts
        self.device, self.dtype = drafter_device(continuing.target), continuing.states_dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.results = [Continuation() for _ in prompts]
        self.states: list[list[torch.Tensor]] = [[] for _ in prompts]
        self.rows = list(range(len(prompts)))  # of each row of the batch, the prompt it continues
        self.sampled = torch.tensor(sampled, dtype=torch.bool, device=self.device)
        self.cache = make_roomy_cache(continuing.target.config)
        self.positions = torch.tensor([len(prompt) for prompt in prompts], device=self.device)[:, None]

    def read_prompts(self) -> torch.Tensor:
        """Runs the target on the prompts; returns the states `(B, H)` of their last tokens."""
        num_shared = _num_shared(self.prompts) if attends_everywhere(self.cache) else 0
        shared, num_rows = self.prompts[0][:num_shared], len(self.prompts)
        begun: list[torch.Tensor] = []
        if num_shared:
            begun = [self._run(torch.tensor([shared]), torch.arange(num_shared)[None], None)[0]]
            self.cache.batch_repeat_interleave(num_rows)
        rests = [prompt[num_shared:] for prompt in self.prompts]
        longest = max(map(len, rests))
        # Padding stands between what is shared and what is not.
        gaps = torch.tensor([longest - len(rest) for rest in rests])[:, None]
        ids = torch.tensor([[0] * (longest - len(rest)) + rest for rest in rests])
        columns = torch.arange(longest)[None]
        self.mask = torch.cat((torch.ones(num_rows, num_shared), columns >= gaps), dim=1).long().to(self.device)
        states = self._run(ids, (num_shared + columns - gaps).clamp(min=0), self.mask)
        if self.dtype is not None:
            for kept, row, rest in zip(self.states, states, rests, strict=True):
                kept += [stored_states(piece, self.dtype) for piece in (*begun, row[longest - len(rest) :])]
            self.num_begun = len(begun) + 1
        return states[:, -1]

    def add_tokens(self, states: torch.Tensor) -> None:
        """Chooses the token that follows the states `(B, H)` of each row."""
        logits = self.continuing.features.lm_head(states)(states)
        if logits.isnan().any():
            raise ValueError(why_not_finite(states.dtype))
        tokens = logits.argmax(dim=-1)
        if self.sampled.any():
            sampling = self.continuing.sampling
            tokens[self.sampled] = sample_nucleus(
                logits[self.sampled], sampling.temperature, sampling.top_p, self.generator
            )
        self.tokens = tokens
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            result = self.results[row]
            if not result.ended:
                result.tokens.append(token)
                result.ended = token in self.continuing.ends

    def compact(self) -> bool:
        """Cuts rows that need no more off where they are many; returns whether any is left."""
        going = [index for index, row in enumerate(self.rows) if self._needs_more(row)]
        if going and len(self.rows) - len(going) >= max(len(self.rows) * _ENDED_SHARE, 1):
            kept = torch.tensor(going)  # in the computer's memory: it indexes layers on several devices
            self.cache.batch_select_indices(kept)
            kept = kept.to(self.device)
            self.mask, self.positions, self.sampled = self.mask[kept], self.positions[kept], self.sampled[kept]
            self.tokens = self.tokens[kept]
            self.rows = [self.rows[index] for index in going]
        return bool(going)

    def step(self) -> torch.Tensor:
        """Runs the target on the tokens that were added; returns their states `(B, H)`."""
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        states = self._run(self.tokens[:, None], self.positions, self.mask)[:, -1]
        self.positions = self.positions + 1
        if self.dtype is not None:
            for row, state in zip(self.rows, stored_states(states, self.dtype), strict=True):
                if self._needs_more(row):
                    self.states[row].append(state[None])
        return states

    def finish(self) -> list[Continuation]:
        """Returns what follows each prompt."""
        if self.dtype is not None:
            for result, states in zip(self.results, self.states, strict=True):
                result.states = torch.cat(states)
        return self.results

    def _needs_more(self, row: int) -> bool:
        """Whether a row has not ended, or the state of its last token is missing."""
        missing = self.dtype is not None and len(self.states[row]) - self.num_begun < len(self.results[row].tokens)
        return not self.results[row].ended or missing

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        states = self.continuing.decoder(
            input_ids=ids.to(self.device),
            attention_mask=mask,
            position_ids=positions.to(self.device),
            use_cache=True,
            **{CACHE_NAME: self.cache},
        ).last_hidden_state
        # Of a target that is split, the states come from another device than the tokens.
        return projected_states(self.continuing.target, states).to(self.device)


def _num_shared(prompts: Sequence[list[int]]) -> int:
    """Returns how many tokens all prompts begin with; each has at least one more."""
    shortest = min(map(len, prompts)) - 1
    same = (len({prompt[index] for prompt in prompts}) == 1 for index in range(shortest))
    return next((index for index, is_same in enumerate(same) if not is_same), shortest)
