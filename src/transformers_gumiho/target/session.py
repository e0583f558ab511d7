"""One generation of the target behind its prompt: a draft tree per pass."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from ..internals import attention_implementation, cache_argument
from ..tree.draft_tree import DraftTree
from ..tree.verification import AcceptedPath
from .cycle_shapes import CycleShapes
from .feature_reader import CapturedPass, FeatureReader, TargetStates, begin_capture, end_capture
from .grouped_attention import groups_in_place
from .requirements import attention_types
from .static_memory import StaticMemory
from .unmasked_attention import tree_attention
from .verification_cache import VerificationCache


@dataclass(frozen=True)
class TargetOutput:
    """
    What the target computed for `n` nodes.

    Attributes:
        logits (`(B, n, V)`): For the prompt, of its last token only (`n = 1`).
        states: Of `T` tokens: `n`, or those of the prompt that were run.
        position_ids (`(B, T)`): The positions of those states.
        hidden_states: All layers' states `(B, T, H)` where they were asked for.
    """

    logits: torch.Tensor
    states: TargetStates
    position_ids: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None


@dataclass(frozen=True)
class TargetPrompt:
    """
    What later passes need to know of the prompt.

    Attributes:
        length: Entries that it has in the cache.
        mask (`(B, length)`, *optional*): False where it is padding. `None` where nothing is.
        next_position (`(..., B, 1)`): The position behind it. Multimodal decoders have several positions per token,
            with the batch in the second dimension.
        cache: The caller's, which its entries came from.
        num_reserved: Slots that follow it in the cache of fixed shapes, and in a growing one at first.
    """

    length: int
    mask: torch.Tensor | None
    next_position: torch.Tensor
    cache: Any
    num_reserved: int


class TargetSession:
    """
    A target that has read its prompt. A context manager: after it the target is without the hook that it needs, and
    the caller's cache holds what was committed, whatever happens. Made by [`read_prompt`].

    Args:
        model: The target.
        model_kwargs: As prepared by `generate()`.
        reader: Of the target's states.
        cache: Holds the prompt.
        prompt: The prompt.
        max_new_tokens: The most tokens that may follow it.
        dtype: Of the target's states. (A quantised target computes in another dtype than it stores.)
        shapes: What the passes run in.
        memory: Where tensors are to lie that captured graphs read; where nothing is compiled, `None`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        reader: FeatureReader,
        cache: VerificationCache,
        prompt: TargetPrompt,
        max_new_tokens: int,
        dtype: torch.dtype,
        shapes: CycleShapes,
        memory: StaticMemory | None = None,
    ):
        self.model = model
        self.memory = memory
        self.cache = cache
        self.prompt = prompt
        self.shapes = shapes
        self.device = prompt.next_position.device
        self._model_kwargs = model_kwargs
        self._reader = reader
        self._dtype = dtype
        self._cache_argument = cache_argument(model)  # not in every pass: it reads signatures
        self._listening = ExitStack()
        self._has_ended = [False] * len(cache.lengths)
        # Plain decoding runs no token at a later position, and a target with a table of positions (one without a
        # rotary embedding) may have none for it.
        self._last_offset = max_new_tokens - 2
        config = model.config.get_text_config(decoder=True)
        has_table = not getattr(config, "rope_parameters", None)
        self._num_positions: int | None = getattr(config, "max_position_embeddings", None) if has_table else None
        # Attention takes less time without a mask, where the implementation is known to do without one.
        self._omits_masks = attention_implementation(config) == "sdpa"
        self._windows = {
            kind: config.sliding_window if kind == "sliding_attention" else None for kind in attention_types(model)
        }

    def __enter__(self) -> "TargetSession":
        self._listening.enter_context(self._reader.listening())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._listening.close()
        if exception[0] is not None:
            # What every row has committed is all that the caller can tell from padding.
            lengths = self.cache.lengths
            self.cache.truncate([length - min(lengths) for length in lengths])
        self.cache.restore(self.prompt.cache)
        if self.memory is not None:
            self.memory.give_back(self.model)

    def run_tree(self, tree: DraftTree) -> TargetOutput:
        """Runs all nodes of `tree`, root included, each seeing the committed context and its own ancestors."""
        if self.shapes.are_compiled:
            # What captured graphs returned in the cycle before may be overwritten from here on.
            torch.compiler.cudagraph_mark_step_begin()
        tree = tree.to(self.device)
        position_ids = self._position_ids(tree)
        tree_masks = self.shapes.stage(_tree_masks, tree.tokens.shape[1])
        masks = tree_masks(tree, self.cache, self._dtype, self._windows, self._omits_masks)
        model_inputs = self.model.prepare_inputs_for_generation(
            tree.tokens,
            **self._node_kwargs(tree.tokens.shape[1]),
            **{self._cache_argument: self.cache.argument},
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            position_ids=position_ids,
        )
        with self._tree_attention():
            outputs, captured = self._run_target(model_inputs, tree.tokens.shape[1])
        return TargetOutput(
            logits=outputs.logits,
            states=self._reader.collect(captured),
            position_ids=text_positions(position_ids),
            hidden_states=outputs.hidden_states,
        )

    @cached_property
    def _tree_attention(self) -> Callable[[], AbstractContextManager[None]]:
        return tree_attention(self.model)

    def commit(self, path: AcceptedPath) -> None:
        """
        Keeps the accepted nodes of the newest pass in the cache. A row that takes no token has ended, and the root is
        its last token: plain decoding has run it while other rows went on, so it stays, too.
        """
        num_entries = [
            int(not has_ended) if length == 0 else length
            for length, has_ended in zip(path.accepted_lengths, self._has_ended, strict=True)
        ]
        self._has_ended = [length == 0 for length in path.accepted_lengths]
        self.cache.commit(replace(path, accepted_lengths=num_entries))

    def finish(self, num_tokens: Sequence[int], last_tokens: torch.Tensor, tree: DraftTree) -> None:
        """
        Leaves in the cache what plain decoding does.

        Args:
            num_tokens: The new tokens of each row that plain decoding has run.
            last_tokens (`(B,)`): The newest token of each row.
            tree: The newest one, for its shape.
        """
        num_missing = [
            self.prompt.length + number - length for number, length in zip(num_tokens, self.cache.lengths, strict=True)
        ]
        if max(num_missing) > 0:
            # Rows that ended in the newest pass, before others did: their last tokens take one pass more.
            self.run_tree(tree.with_root(last_tokens))
            roots = torch.zeros_like(last_tokens)[:, None].to(self.device)
            self.cache.commit(AcceptedPath(roots, last_tokens[:, None], [max(number, 0) for number in num_missing]))
        self.cache.truncate([max(-number, 0) for number in num_missing])

    def _run_target(self, model_inputs: dict[str, Any], num_tokens: int) -> tuple[Any, tuple[CapturedPass, ...]]:
        """Returns what the target returns for so many tokens in each row, and the states that were captured."""
        with groups_in_place():
            return self.shapes.stage(_run_model, num_tokens)(self.model, model_inputs)

    def _position_ids(self, tree: DraftTree) -> torch.Tensor:
        return self._positions(self.cache.starts(self.device) - self.prompt.length + tree.depths)

    def _positions(self, offsets: torch.Tensor) -> torch.Tensor:
        """Returns the positions of tokens `offsets` `(B, n)` behind the prompt."""
        # Nodes behind the last position are never committed.
        position_ids = self.prompt.next_position + offsets.clamp(max=self._last_offset)
        return position_ids if self._num_positions is None else position_ids.clamp_(max=self._num_positions - 1)

    def _node_kwargs(self, num_nodes: int) -> dict[str, Any]:
        """Returns the arguments of the caller that go to every pass, extended to `num_nodes` nodes where needed."""
        handled = (
            self._cache_argument,
            "attention_mask",
            "position_ids",
            "inputs_embeds",
            "logits_to_keep",
        )
        kwargs = {name: value for name, value in self._model_kwargs.items() if name not in handled}
        if (token_type_ids := kwargs.get("token_type_ids")) is not None:
            kwargs["token_type_ids"] = token_type_ids[:, -1:].expand(-1, num_nodes)
        if (token_type_ids := kwargs.get("mm_token_type_ids")) is not None:
            kwargs["mm_token_type_ids"] = token_type_ids.new_zeros(token_type_ids.shape[0], num_nodes)
        return kwargs


def _run_model(model: PreTrainedModel, model_inputs: dict[str, Any]) -> tuple[Any, tuple[CapturedPass, ...]]:
    begin_capture()
    outputs = model(**model_inputs, return_dict=True)
    return outputs, end_capture()


def _tree_masks(
    tree: DraftTree, cache: VerificationCache, dtype: torch.dtype, windows: dict[str, int | None], omits_masks: bool
) -> dict[str, torch.Tensor | None]:
    """Returns the mask of a tree for each kind of attention, `None` where it may be omitted and would hide nothing."""
    return {
        kind: None
        if omits_masks and cache.hides_nothing(tree.tokens.shape[1], window)
        else cache.attention_mask(tree.ancestors, tree.depths, dtype, window)
        for kind, window in windows.items()
    }


def text_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns `(B, n)`: of several positions per token `(P, B, n)` the first."""
    return position_ids if position_ids.ndim == 2 else position_ids[0]
