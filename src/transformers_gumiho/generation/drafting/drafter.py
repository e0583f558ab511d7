"""Drafting one tree: serial passes, one parallel pass, and the choice of the best nodes."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...internals import mark_static_address
from ...model.decoding_settings import DraftingSettings
from ...model.modeling_gumiho import GumihoModel
from ...model.parallel_heads import run_batched_heads
from ...model.transition import NUM_CANDIDATES
from ..tree.draft_tree import DraftLevel, DraftTree, build_tree, extend_level, gather_rows
from ..tree.uploads import upload
from ..verification.attention import gqa_without_copies
from ..verification.attention_kind import attention_kind
from ..verification.cycle_shapes import CycleShapes
from ..verification.session import CommittedTokens
from ..verification.tree_cache import TreeCache
from .transitions import DraftTransitions, extend_paths


@dataclass(frozen=True)
class GenerationView:
    """
    What a drafter sees of the generation that it drafts for. By default nothing.

    Attributes:
        prompt_length: Tokens of the prompt in each row, padding included.
        prompt_chunk_size: Most tokens of the prompt that are read in one pass. By default all.
        drafter_pass: Returns a context manager for each pass of a module of the drafter or of the output head.
        tokens_from: Returns the text's tokens of each row from index `starts[b]` on.
        peek_noise: As `TokenChooser.peek_noise`, the noise of the target's next draws.
    """

    prompt_length: int = 0
    prompt_chunk_size: int | None = None
    drafter_pass: Callable[[], AbstractContextManager[None]] = nullcontext
    tokens_from: Callable[[Sequence[int]], list[list[int]]] = lambda starts: [[] for _ in starts]
    peek_noise: Callable[[int, torch.Tensor | None], torch.Tensor | None] = lambda num_draws, token_ids: None


@dataclass(frozen=True)
class NewestTokens:
    """
    The newest committed token of each row, under which a tree grows: its id `(B, 1)`, the serial feature `(B, 1, H)`
    that predicts the token after it, and its position `(B, 1)`.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    position_ids: torch.Tensor


@dataclass(eq=False)
class GumihoDrafter:
    """
    Drafts trees for one call of `generate()`, and keeps the serial head's cache up to date with the committed text.

    `K` is the number of tokens that may be drafted. Levels of a tree hold their indices, from 0 to `K - 1`.

    Args:
        assistant_model ([`GumihoModel`]): The drafter, on any device.
        lm_head: Maps hidden states `(..., H)` to logits `(..., K)` on the target's device.
        settings ([`DraftingSettings`]): Shape of the tree.
        cache ([`TreeCache`]): An empty cache for the serial head. With fixed shapes it must have room for all cycles.
        shapes: Shapes of the cycles. By default they follow the text.
        token_ids (`(K,)`, *optional*): Ids of the tokens that `lm_head` scores. By default all of the vocabulary.
        head_module (*optional*): The module that `lm_head` runs. What is computed with it is kept for later calls.
        generation ([`GenerationView`], *optional*): The generation that is drafted for.
    """

    assistant_model: GumihoModel
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    settings: DraftingSettings
    cache: TreeCache
    shapes: CycleShapes = field(default_factory=CycleShapes)
    token_ids: torch.Tensor | None = None
    head_module: nn.Module | None = None
    generation: GenerationView = field(default_factory=GenerationView)

    def __post_init__(self) -> None:
        model, settings = self.assistant_model, self.settings
        self.device = model.fc.weight.device
        self._has_read_prompt = False
        self._num_serial = min(model.config.num_serial_tokens, settings.tree_depth)
        self._num_heads = settings.tree_depth - self._num_serial
        self._head_weights = model.mlp.batched_weights()
        attention = attention_kind(model, model.config.get_text_config())
        # What a user registered in the place of `sdpa` gets the masks that transformers makes for it.
        self._takes_boolean_masks = attention.name == "sdpa" and bool(attention.registered)
        self._window = model.serial_head.window(model.config)
        self._transitions: Any = None
        if model.transition is not None and self._num_heads > 0:
            with torch.no_grad():
                self._transitions = DraftTransitions(
                    model, self._num_heads, self.lm_head, self.token_ids, self.head_module, self.cache.memory
                )
        # The masks and offsets of the tokens that a cycle may commit, made once for all cycles.
        self._max_committed = settings.longest_path + 1
        self._causal, self._offsets = self._causal_block(self._max_committed)
        # Logits are multiplied by 1 / draft temperature. With the noise of the target's draws, they are divided by the
        # target's temperature, too, because its tokens are drawn under both.
        self._scales = 1 / torch.tensor(settings.temperatures, dtype=torch.float32, device=self.device)
        self._sampling_scales = self._scales / (settings.sampling_temperature or 1.0)
        if self.shapes.are_fixed:
            for tensor in itertools.chain(*(self._head_weights or [])):
                mark_static_address(tensor)
        # A compiled function cannot call observers.
        self.around_pass = nullcontext if self.shapes.are_compiled else self.generation.drafter_pass
        # Of the class and not of this object, which would be compiled anew in each call.
        self._draft_fixed = self.shapes.compiler(GumihoDrafter._draft_after)

    @torch.no_grad()
    @gqa_without_copies()
    def draft(self, committed: CommittedTokens) -> DraftTree:
        """Reads what was committed since the last draft, and drafts a tree under the last token of each row."""
        noise = self.generation.peek_noise(self.settings.tree_depth, self.token_ids)
        if noise is not None:
            noise = noise * self._scales[:, None].to(noise.device)
        tokens, position_ids = committed.tokens, committed.position_ids
        lengths = committed.accepted_lengths
        if not self._has_read_prompt:
            feature = self._read_prompt(committed)
            newest = NewestTokens(last_of_rows(tokens, lengths), feature, last_of_rows(position_ids, lengths))
            return self._grow_tree(newest, noise)
        if not self.shapes.are_fixed:
            return self._draft_after(tokens, committed.target_states, position_ids, lengths, noise)
        *older, last = committed.split(self._max_committed)
        for part in older:
            # Not compiled, as this happens only after a pause.
            self._read(*_stage_inputs(part))
        # A copy: a captured graph may overwrite what it returned before.
        tree = self._draft_fixed(self, *_stage_inputs(last), noise).clone()
        self.cache.count(lengths)
        return tree

    def _read_prompt(self, prompt: CommittedTokens) -> torch.Tensor:
        """Fills the cache with the prompt. Returns the serial feature of its last token, `(B, 1, H)`."""
        self._has_read_prompt = True
        mask, (num_rows, num_tokens) = prompt.attention_mask, prompt.tokens.shape
        self.cache.hide(mask)
        chunk_size = self.generation.prompt_chunk_size or num_tokens
        for start in range(0, num_tokens, chunk_size):
            chunk = slice(start, min(start + chunk_size, num_tokens))
            seen = None if mask is None else mask[:, : chunk.stop]
            features = self._read_chunk(
                prompt.tokens[:, chunk], prompt.target_states[:, chunk], prompt.position_ids[:, chunk], seen
            )
            self.cache.commit([chunk.stop - start] * num_rows)
        if self.shapes.are_fixed:
            self.cache.fix_shapes(prompt.tokens.device)
        return features[:, -1:]

    def _read_chunk(
        self, tokens: torch.Tensor, target_states: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Adds a part of the prompt to the cache. Returns its serial features `(B, n, H)`."""
        fused = self._fuse(tokens, target_states, are_targets=True)
        return self._run_serial_head(fused, mask, position_ids)

    def _read(
        self,
        tokens: torch.Tensor,
        target_states: torch.Tensor,
        position_ids: torch.Tensor,
        accepted_lengths: list[int] | torch.Tensor,
    ) -> torch.Tensor:
        """Adds committed tokens to the cache. Returns their serial features `(B, n, H)`."""
        features = self._run_committed(tokens, target_states, position_ids)
        if isinstance(accepted_lengths, torch.Tensor):
            self.cache.commit_on_device(accepted_lengths)
        else:
            self.cache.commit(accepted_lengths)
        return features

    def _run_committed(
        self, tokens: torch.Tensor, target_states: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        n = tokens.shape[1]
        visible, offsets = self._causal[:, :n, :n], self._offsets[:, :n]
        if n > self._max_committed:  # after a pause
            visible, offsets = self._causal_block(n)
        fused = self._fuse(tokens, target_states, are_targets=True)
        return self._run_block(fused, visible, offsets, position_ids)

    def _draft_after(
        self,
        tokens: torch.Tensor,
        target_states: torch.Tensor,
        position_ids: torch.Tensor,
        accepted_lengths: list[int] | torch.Tensor,
        noise: torch.Tensor | None,
    ) -> DraftTree:
        """Drafts after committed tokens, whose `accepted_lengths` `(B,)` are on the device in fixed shapes."""
        features = self._read(tokens, target_states, position_ids, accepted_lengths)
        newest = NewestTokens(
            last_of_rows(tokens, accepted_lengths),
            last_of_rows(features, accepted_lengths),
            last_of_rows(position_ids, accepted_lengths),
        )
        return self._grow_tree(newest, noise)

    def _causal_block(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the causal mask `(B, n, n)` of consecutive tokens, and their offsets `(B, n)` from the first."""
        batch_size = len(self.cache.lengths)
        offsets = torch.arange(num_tokens, device=self.device)
        visible = offsets[:, None] >= offsets
        return visible.expand(batch_size, -1, -1), offsets.expand(batch_size, -1)

    def _grow_tree(self, newest: NewestTokens, noise: torch.Tensor | None) -> DraftTree:
        """Drafts a tree under the newest tokens, with the scaled noise `(B, tree_depth, K)`."""
        levels = self._draft_levels(newest, noise)
        roots = newest.tokens.squeeze(1).to(levels[0].tokens.device)
        num_nodes, depth = self.settings.num_assistant_tokens, self.settings.tree_depth
        return build_tree(roots, levels, num_nodes, depth, self.token_ids)

    def _draft_levels(self, newest: NewestTokens, noise: torch.Tensor | None) -> list[DraftLevel]:
        """Drafts the levels of a tree: those of serial tokens, then those of the parallel heads."""
        levels, path_inputs = self._draft_serially(newest, noise)
        if self._num_heads > 0:
            features = self._run_heads(torch.cat(path_inputs, dim=-1))
            levels += self._recombine(levels[-1], self.score(features), noise)
        return levels

    def _draft_serially(
        self, newest: NewestTokens, noise: torch.Tensor | None
    ) -> tuple[list[DraftLevel], list[torch.Tensor]]:
        """
        Drafts the serial tokens one after the other. Returns the levels, and for each serial token the fused inputs
        `(B, paths, H)` of the paths that are extended.
        """
        settings, feature = self.settings, newest.features
        level: DraftLevel | None = None
        levels: list[DraftLevel] = []
        path_inputs: list[torch.Tensor] = []
        visible = depths = None
        for step in range(1, self._num_serial + 1):
            # 1. The best tokens after each path, by the features that predict them, make the next level.
            logits = self.score(self.assistant_model.predict(feature)[:, None])
            tokens, log_probs = self._topk(logits, settings.branching_factor, slice(step - 1, step), noise)
            tokens, log_probs = tokens.squeeze(1), log_probs.squeeze(1)
            levels.append(extend_level(level, tokens, log_probs, settings.num_assistant_tokens))
            level = levels[-1].first(settings.branching_factor)
            if step == settings.tree_depth:
                break
            # 2. The best paths go on: each has its own tokens, and the features that predict the next ones.
            parents, tokens = level.parents.to(feature.device), level.tokens
            if self.token_ids is not None:
                tokens = self.token_ids.to(tokens.device)[tokens]
            fused = self._fuse(tokens.to(feature.device), gather_rows(feature, parents))
            if self._num_heads > 0:
                path_inputs = [gather_rows(inputs, parents) for inputs in path_inputs] + [fused]
            if step < self._num_serial:
                # 3. Their candidates see those above them. They stay in the cache until the tree is drafted.
                visible, depths = _append_candidates(visible, depths, parents, step - 1)
                positions = (newest.position_ids + step).expand(-1, fused.shape[1])
                feature = self._run_block(fused, visible, depths, positions)
                self.cache.num_pending += fused.shape[1]
        self.cache.num_pending = 0
        return levels, path_inputs

    def _recombine(self, last_level: DraftLevel, logits: torch.Tensor, noise: torch.Tensor | None) -> list[DraftLevel]:
        """
        Returns the levels of all combinations, under the paths of the last serial level, of tokens that one pass
        predicts: by their logits `(B, heads, P, K)` for each later depth and path.
        """
        settings = self.settings
        depths = slice(self._num_serial, settings.tree_depth)
        num_candidates = settings.beam if self._transitions is None else NUM_CANDIDATES
        tokens, log_probs = self._topk(logits, num_candidates, depths, noise)
        if self._transitions is None:
            # The same under each candidate of the depth above.
            log_probs = log_probs[:, :, :, None].expand(-1, -1, -1, tokens.shape[3], -1)
        else:
            above = last_level.first(settings.branching_factor).tokens
            scales = self._scales if noise is None else self._sampling_scales
            scales = scales[depths, None, None, None].to(log_probs.device)
            log_probs = self._transitions.apply(above, tokens, log_probs, scales)
        return extend_paths(last_level, tokens, log_probs, settings.num_assistant_tokens, settings.beam)

    def _topk(
        self, logits: torch.Tensor, num_tokens: int, depths: slice, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Returns the best tokens by logits `(B, d, n, K)` of `d` depths, counted from 0, and their draft
        log-probabilities, both `(B, d, n, num_tokens)`; fewer if fewer may be drafted.
        """
        logits = logits.float()
        if noise is None:
            logits = logits * self._scales[depths, None, None].to(logits.device)
        else:
            scales = self._sampling_scales[depths, None, None].to(logits.device)
            logits = torch.addcmul(noise[:, depths, None].to(logits.device), logits, scales)
        best = logits.log_softmax(dim=-1).topk(min(num_tokens, logits.shape[-1]))
        # A log-softmax is at most 0, so no node scores above its parent; an overflow makes it NaN.
        return best.indices, best.values.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)

    def score(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the logits `(..., K)` of the tokens that may be drafted, for predicted states `(..., H)`."""
        with self.around_pass():
            return self.lm_head(features)

    def _fuse(self, tokens: torch.Tensor, features: torch.Tensor, are_targets: bool = False) -> torch.Tensor:
        """Returns the serial head's inputs, for features of its own or for the target's hidden states."""
        with self.around_pass():
            if are_targets:
                features = self.assistant_model.read_target(features)
            return self.assistant_model.fuse(tokens, features)

    def _run_serial_head(self, fused: torch.Tensor, mask: Any, position_ids: torch.Tensor) -> torch.Tensor:
        with self.around_pass():
            return self.assistant_model.run_serial_head(fused, mask, position_ids, self.cache)

    def _run_block(
        self, fused: torch.Tensor, visible: torch.Tensor, depths: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Runs the serial head on a block after the committed context; see [`tree_attention_mask`]."""
        dtype = torch.bool if self._takes_boolean_masks else fused.dtype
        mask = self.cache.attention_mask(visible, depths, dtype, self._window)
        return self._run_serial_head(fused, mask, position_ids)

    def _run_heads(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the features `(B, heads, paths, H)` of the parallel heads."""
        with self.around_pass():
            if self._head_weights is None:
                return self.assistant_model.mlp(inputs)[:, : self._num_heads]
            return run_batched_heads(self._head_weights, inputs, self._num_heads)


def _append_candidates(
    visible: torch.Tensor | None, depths: torch.Tensor | None, parents: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns which of all candidates each of the newest ones sees, its ancestors and itself, and the depths `(B, n)` of
    all. `visible` `(B, previous, n)` and `depths` are those of the level above, if there is one, in which the newest
    ones of this `depth` have their `parents` `(B, new)`.
    """
    batch_size, num_new = parents.shape
    itself = torch.eye(num_new, dtype=torch.bool, device=parents.device).expand(batch_size, -1, -1)
    own_depths = torch.full_like(parents, depth)
    if visible is None or depths is None:
        return itself, own_depths
    visible = torch.cat((gather_rows(visible, parents), itself), dim=2)
    return visible, torch.cat((depths, own_depths), dim=1)


def last_of_rows(tensor: torch.Tensor, lengths: list[int] | torch.Tensor) -> torch.Tensor:
    """Returns entry `lengths[b] - 1` (entry 0 if the length is 0) of each row of `(B, n, ...)`, as `(B, 1, ...)`."""
    if not isinstance(lengths, torch.Tensor):
        if min(lengths) == max(lengths):
            last = max(lengths[0] - 1, 0)
            return tensor[:, last : last + 1]
        lengths = upload(lengths, tensor.device)
    index = (lengths - 1).clamp(min=0).view(-1, 1, *[1] * (tensor.ndim - 2))
    return tensor.gather(1, index.expand(-1, -1, *tensor.shape[2:]))


def _stage_inputs(committed: CommittedTokens) -> tuple[torch.Tensor, ...]:
    """Returns committed tokens as arguments of a compiled stage."""
    # A single row has the strides of the buffer that it was cut from, and these change.
    tokens = committed.tokens.flatten().view(committed.tokens.shape)
    lengths = upload(committed.accepted_lengths, tokens.device)
    return tokens, committed.target_states, committed.position_ids, lengths
