"""The target after the prefill: runs one draft tree per pass."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from ...internals import modules_of
from ..tree.draft_tree import DraftTree, map_tensors, padded_root
from ..tree.uploads import upload
from ..tree.walk import AcceptedPath, pick
from .attention import gqa_without_copies, masked_attention
from .attention_kind import attention_classes
from .cycle_shapes import CycleShapes, StaticMemory
from .experts import experts_of_decoding
from .target_states import CapturedPass, FeatureReader, TargetStates, begin_capture, end_capture
from .traits import TargetTraits
from .tree_cache import TreeCache


@dataclass(frozen=True)
class TargetOutput:
    """
    The output of a pass over `n` nodes.

    Attributes:
        logits (`(B, n, V)`): For the prompt, of its last token only (`n = 1`).
        states: Hidden states. `T` is `n` for a tree; for the prefill, the number of prompt tokens that ran (fewer with
            a cache).
        position_ids (`(B, T)`): The positions of those states.
        hidden_states: All layers' states `(B, T, H)` where they were asked for.
    """

    logits: torch.Tensor
    states: TargetStates
    position_ids: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None


@dataclass(frozen=True)
class CommittedTokens:
    """
    The newly committed tokens of each row, aligned left, and the target's hidden states that predicted them.

    Attributes:
        tokens (`(B, n)`): The token ids.
        target_states (`(B, n, k * H)`): The target's states of the layers that the drafter reads, one state per token.
        position_ids (`(B, n)`): The positions of these states.
        accepted_lengths: Number of committed tokens in each row. Entries after them have no meaning.
        attention_mask (`(B, n)`, *optional*): For the prompt: 0 if the state belongs to padding.
    """

    tokens: torch.Tensor
    target_states: torch.Tensor
    position_ids: torch.Tensor
    accepted_lengths: list[int]
    attention_mask: torch.Tensor | None = None

    def to(self, device: torch.device) -> "CommittedTokens":
        """Returns the same with all tensors on `device`."""
        return map_tensors(self, lambda tensor: tensor.to(device))

    def narrow(self) -> "CommittedTokens":
        """Returns the same without columns that no row uses."""
        width = max(self.accepted_lengths)
        return map_tensors(self, lambda tensor: tensor[:, :width])

    @classmethod
    def join(cls, parts: Sequence["CommittedTokens"]) -> "CommittedTokens":
        """Returns the tokens of consecutive cycles as if one cycle had committed them. The prompt is not joined."""
        if len(parts) == 1:
            return parts[0]
        columns: list[list[int]] = [[] for _ in parts[0].accepted_lengths]
        start = 0
        for part in parts:
            for row, length in zip(columns, part.accepted_lengths, strict=True):
                row.extend(range(start, start + length))
            start += part.tokens.shape[1]
        tokens = torch.cat([part.tokens for part in parts], dim=1)
        states = torch.cat([part.target_states for part in parts], dim=1)
        joined = cls(tokens, states, torch.cat([part.position_ids for part in parts], dim=1), [])
        return joined._pick(columns, max(map(len, columns)))

    def split(self, width: int) -> list["CommittedTokens"]:
        """Returns the same tokens in parts of `width`, the oldest first. The last part has each row's newest token."""
        if self.tokens.shape[1] == width:
            return [self]
        parts: list[CommittedTokens] = []
        ends = list(self.accepted_lengths)
        while not parts or max(ends) > 0:
            starts = [max(end - width, 0) for end in ends]
            parts.append(self._pick([list(range(*bounds)) for bounds in zip(starts, ends, strict=True)], width))
            ends = starts
        return parts[::-1]

    def _pick(self, columns: Sequence[list[int]], width: int) -> "CommittedTokens":
        """Returns the tokens in these columns of each row, aligned left, padded with any tokens to `width`."""
        index = upload([[*row, *[0] * (width - len(row))] for row in columns], self.tokens.device)
        states = index.to(self.target_states.device)[:, :, None].expand(-1, -1, self.target_states.shape[2])
        return CommittedTokens(
            self.tokens.gather(1, index),
            self.target_states.gather(1, states),
            self.position_ids.gather(1, index.to(self.position_ids.device)),
            [len(row) for row in columns],
        )


@dataclass(frozen=True)
class TargetPrompt:
    """
    State after the prefill.

    Attributes:
        length: Number of cache entries of the prompt.
        mask (`(B, length)`, *optional*): False at padding. `None` without any.
        next_position (`(..., B, 1)`): The position after it. Multimodal decoders have several per token.
        cache: The cache that the caller passed or `generate()` made.
        keeps_cache: Whether anybody sees that cache after the generation.
        num_reserved: Slots that follow it in the cache of fixed shapes, and in a growing one at first.
    """

    length: int
    mask: torch.Tensor | None
    next_position: torch.Tensor
    cache: Any
    keeps_cache: bool
    num_reserved: int


@dataclass(eq=False)
class TargetSession:
    """
    A target after the prefill, as a context manager; [`read_prompt`] makes it. At its end, also after an error, its
    hooks are removed, and the caller's cache holds what was committed.

    Attributes:
        model_kwargs: As prepared by `generate()`.
        reader: Reads the target's states.
        cache: The cache of the passes, which holds the prompt.
        max_new_tokens: The most tokens that may follow it.
        max_path: The most nodes of a path, root included.
        dtype: Dtype of the attention scores. (A quantized target computes in another dtype than it stores.)
        shapes: The shapes of its passes.
        memory: Allocates the tensors that captured graphs read; `None` where nothing is compiled.
        prefill: The output for the prompt, until [`committed_prompt`] has taken its states.
    """

    model: PreTrainedModel
    traits: TargetTraits
    model_kwargs: dict[str, Any]
    reader: FeatureReader
    cache: Any
    prompt: TargetPrompt
    max_new_tokens: int
    max_path: int
    dtype: torch.dtype
    shapes: CycleShapes
    memory: StaticMemory | None
    prefill: TargetOutput = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.device = self.prompt.next_position.device
        self._listening = ExitStack()
        self._has_ended = [False] * len(self.cache.lengths)
        # Plain decoding runs no later token, and a table of positions (without a rotary embedding) may end there.
        self._last_offset = self.max_new_tokens - 2
        config = self.traits.config
        has_table = not getattr(config, "rope_parameters", None)
        self._num_positions: int | None = getattr(config, "max_position_embeddings", None) if has_table else None

    def __enter__(self) -> "TargetSession":
        self._listening.enter_context(self.reader.listening())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._listening.close()
        if self.prompt.keeps_cache:
            if exception[0] is not None:
                # The caller can distinguish from padding only what every row has committed.
                lengths = self.cache.lengths
                self.cache.truncate([length - min(lengths) for length in lengths])
            self.cache.restore(self.prompt.cache)
        if self.memory is not None:
            self.memory.give_back(self.model)

    def run_tree(self, tree: DraftTree, has_ended: Sequence[bool] = ()) -> TargetOutput:
        """
        Runs all nodes of `tree`, root included, each seeing the committed context and its own ancestors. `has_ended`
        are the rows that take no more tokens.
        """
        if self.shapes.are_compiled:
            # From here on, captured graphs may overwrite what they returned in the last cycle.
            torch.compiler.cudagraph_mark_step_begin()
        tree, attention = tree.to(self.device), self.traits.attention
        num_nodes = tree.tokens.shape[1]
        # Attention is faster without a mask, where the implementation is known to do without one.
        make_masks = self.shapes.stage(_tree_masks, num_nodes)
        masks = make_masks(tree, self.cache, self.dtype, self.traits.windows, attention.omits_masks)
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        position_ids = self._positions(self.cache.starts(self.device) - self.prompt.length + tree.depths)
        with self._tree_attention():
            outputs, captured = self._run_target(tree.tokens, self.cache, mask, num_nodes, position_ids=position_ids)
        states = self.reader.collect(captured)
        return TargetOutput(outputs.logits, states, text_positions(position_ids), outputs.hidden_states)

    @cached_property
    def _tree_attention(self) -> Callable[[], AbstractContextManager[None]]:
        attention = self.traits.attention
        if not attention.is_replaced:
            return nullcontext
        return masked_attention(self.model, attention.name, attention_classes(modules_of(self.model.get_decoder())))

    def keep(self, path: AcceptedPath, output: TargetOutput) -> CommittedTokens:
        """
        Keeps the accepted nodes of the newest pass in the cache. Returns the committed tokens with the states of their
        nodes, from the `output` of that pass. With fixed shapes the width is the same in every cycle.
        """
        if self.shapes.are_fixed:
            # Also for a smaller tree than usual. A copy, because a captured graph may overwrite what it returned.
            path = path.padded(self.max_path)
        self._keep_entries(path)
        width = path.nodes.shape[1] if self.shapes.are_fixed else max(path.accepted_lengths)
        nodes = path.nodes[:, :width]
        return CommittedTokens(
            path.tokens[:, :width],
            pick(output.states.target_states, nodes),
            output.position_ids.gather(1, nodes.to(output.position_ids.device)),
            path.accepted_lengths,
        )

    def committed_prompt(self, text: torch.Tensor, vocab_size: int) -> CommittedTokens:
        """
        Returns the tokens after those that the prefill ran: of all the prompt, or of what follows the caller's cache.
        It can be called once, as the states of a long prompt take memory.

        Args:
            text (`(B, T + 1)`): The prompt and the first new token. With `inputs_embeds` the new token alone.
            vocab_size: Number of tokens that the drafter knows. A multimodal prompt may mark its images by others.
        """
        states, position_ids, mask = self.prefill.states.target_states, self.prefill.position_ids, self.prompt.mask
        del self.prefill
        # A model that puts an image before the text (GIT) has more states than positions.
        num_known = min(states.shape[1], text.shape[1], position_ids.shape[1])
        return CommittedTokens(
            text[:, -num_known:].clamp(0, vocab_size - 1),
            states[:, -num_known:],
            position_ids[:, -num_known:],
            [num_known] * len(text),
            None if mask is None else mask[:, -num_known:],
        )

    def _keep_entries(self, path: AcceptedPath) -> None:
        # In a row that has just ended the root is its last token. It stays, as plain decoding runs it while other rows
        # continue.
        num_entries = [
            int(not has_ended) if length == 0 else length
            for length, has_ended in zip(path.accepted_lengths, self._has_ended, strict=True)
        ]
        self._has_ended = [length == 0 for length in path.accepted_lengths]
        self.cache.keep_path(replace(path, accepted_lengths=num_entries))

    def finish(self, num_tokens: Sequence[int], last_tokens: torch.Tensor, tree: DraftTree) -> None:
        """
        Leaves in the caller's cache what plain decoding does: `num_tokens` new tokens of each row. `last_tokens`
        `(B,)` are the newest tokens; `tree` is the newest one, for its shape. Does nothing if nobody sees the cache.
        """
        if not self.prompt.keeps_cache:
            return
        num_missing = [
            self.prompt.length + number - length for number, length in zip(num_tokens, self.cache.lengths, strict=True)
        ]
        if max(num_missing) > 0:
            # Rows that ended in the newest pass, before others did: their last tokens take one pass more.
            num_unused = tree.tokens.shape[1] - 1 if self.shapes.are_fixed else 0
            self.run_tree(padded_root(last_tokens, num_unused, tree.max_depth))
            roots = torch.zeros_like(last_tokens)[:, None].to(self.device)
            self.cache.keep_path(AcceptedPath(roots, last_tokens[:, None], [max(number, 0) for number in num_missing]))
        self.cache.truncate([max(-number, 0) for number in num_missing])

    def _run_target(
        self, tokens: torch.Tensor, cache: Any, attention_mask: Any, num_logits: int, **inputs: Any
    ) -> tuple[Any, tuple[CapturedPass, ...]]:
        """Runs `tokens` `(B, n)`. Returns the output, with the logits of the last ones, and the captured states."""
        num_tokens = tokens.shape[1]
        model_inputs = self.model.prepare_inputs_for_generation(
            tokens,
            **self._node_kwargs(num_tokens) | inputs,
            **{self.traits.cache_argument: cache},
            attention_mask=attention_mask,
        )
        if "logits_to_keep" in model_inputs:  # some models put in their own
            model_inputs["logits_to_keep"] = num_logits
        # The condition of `generate()`.
        is_step_of_decoding = num_tokens == 1 and self.model.device.type != "cpu"
        with gqa_without_copies(), experts_of_decoding() if is_step_of_decoding else nullcontext():
            return self.shapes.stage(_run_model, num_tokens)(self.model, model_inputs | self.traits.unused_outputs)

    def _positions(self, offsets: torch.Tensor) -> torch.Tensor:
        """Returns the positions of tokens `offsets` `(B, n)` after the prompt."""
        # Nodes after the last position are never committed.
        position_ids = self.prompt.next_position + offsets.clamp(max=self._last_offset)
        return position_ids if self._num_positions is None else position_ids.clamp_(max=self._num_positions - 1)

    def _node_kwargs(self, num_nodes: int) -> dict[str, Any]:
        """Returns the caller's arguments of every pass, extended to `num_nodes` nodes where needed."""
        handled = (self.traits.cache_argument, "attention_mask", "position_ids", "inputs_embeds", "logits_to_keep")
        kwargs = {name: value for name, value in self.model_kwargs.items() if name not in handled}
        if (types := kwargs.get("token_type_ids")) is not None:
            kwargs["token_type_ids"] = types[:, -1:].expand(-1, num_nodes)
        if (types := kwargs.get("mm_token_type_ids")) is not None:
            kwargs["mm_token_type_ids"] = types.new_zeros(types.shape[0], num_nodes)
        return kwargs


def _run_model(model: PreTrainedModel, model_inputs: dict[str, Any]) -> tuple[Any, tuple[CapturedPass, ...]]:
    begin_capture()
    outputs = model(**model_inputs, return_dict=True)
    return outputs, end_capture()


def _tree_masks(
    tree: DraftTree, cache: TreeCache, dtype: torch.dtype, windows: dict[str, int | None], omits_masks: bool
) -> dict[str, torch.Tensor | None]:
    """Returns the mask of a tree for each kind of attention, `None` where it may be omitted and would hide nothing."""
    return {
        kind: None
        if omits_masks and cache.needs_no_mask(tree.tokens.shape[1], window)
        else cache.attention_mask(tree.ancestors, tree.depths, dtype, window)
        for kind, window in windows.items()
    }


def text_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns `(B, n)`: of several positions per token `(P, B, n)` the first."""
    return position_ids if position_ids.ndim == 2 else position_ids[0]
