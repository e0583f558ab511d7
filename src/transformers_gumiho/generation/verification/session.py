"""The target after the prefill: runs one draft tree per pass."""

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from ...internals import CACHE_NAME, modules_of
from ..tree.draft_tree import DraftTree, map_tensors, single_path
from ..tree.uploads import upload
from ..tree.walk import Path, longest_path, pick
from .attention import gqa_without_copies, masked_attention
from .attention_kind import attention_classes
from .cycle_shapes import CycleShapes
from .target_memory import StaticMemory
from .target_states import CapturedPass, FeatureReader, TargetStates, begin_capture, end_capture
from .traits import STATE_KINDS, TargetTraits, filled_layers
from .tree_cache import TreeCache


# Arguments of the target that each pass makes anew.
ARGUMENTS_OF_PASSES = (CACHE_NAME, "attention_mask", "position_ids", "inputs_embeds", "logits_to_keep")
# Most tokens of a text that one pass takes: what a recurrence holds grows with their square.
NODES_PER_PASS = 64


@dataclass(frozen=True)
class TargetOutput:
    """
    The output of a pass over `n` nodes.

    Attributes:
        logits (`(B, n, V)`): For the prompt, of its last token only (`n = 1`).
        states: Hidden states of the `T = n` nodes, or of the prompt's tokens that ran (fewer with a cache).
        position_ids (`(B, T)`): The positions of those states; of a prompt `(..., B, T)`.
        hidden_states: All layers' states `(B, T, H)` where they were asked for.
    """

    logits: torch.Tensor
    states: TargetStates
    position_ids: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None


@dataclass(frozen=True)
class CommittedTokens:
    """
    The newly committed `tokens` `(B, n)` of each row, aligned left, and the target's states that predicted them.

    Attributes:
        target_states (`(B, n, k * H)`): The states of the layers that the drafter reads, one per token.
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
        cache: The caller's cache, or that of `generate()`.
        keeps_cache: Whether anybody sees that cache after the generation.
    """

    length: int
    mask: torch.Tensor | None
    next_position: torch.Tensor
    cache: Any
    keeps_cache: bool

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return self.next_position.shape[-2]


@dataclass(eq=False)
class TargetSession:
    """
    A target after the prefill, as a context manager. At its end, also after an error, its hooks are removed, and the
    caller's cache holds what was committed.

    Attributes:
        reader: Reads the target's states.
        model_kwargs: The caller's arguments of passes after the prefill.
        kwargs_per_token: Names of those that have a value for each token; they hold a new token's, `(B, 1, ...)`.
        cache: The cache of the passes, which holds the prompt.
        num_reserved: Slots that follow the prompt in it; in a growing one at first.
        prefill: The output for the prompt, until [`committed_prompt`] has taken its states.
        max_new_tokens: The most tokens that may follow it.
        max_path: The most nodes of a path, root included.
        shapes: The shapes of its passes.
        memory: Allocates the tensors that captured graphs read; `None` where nothing is compiled.
        pad_token_id: What plain decoding runs in rows that have ended.
    """

    reader: FeatureReader
    traits: TargetTraits
    model_kwargs: dict[str, Any]
    kwargs_per_token: Set[str]
    cache: Any
    num_reserved: int
    prompt: TargetPrompt
    prefill: TargetOutput
    max_new_tokens: int
    max_path: int
    shapes: CycleShapes
    memory: StaticMemory | None
    pad_token_id: int

    def __post_init__(self) -> None:
        self.model, self.device = self.reader.target, self.prompt.next_position.device
        # Attention scores have the dtype of the keys, which the last states may not have.
        layers = filled_layers(self.cache)
        self.dtype = layers[0].keys.dtype if layers else self.prefill.states.last.dtype
        self._listening = ExitStack()
        self._has_ended = [False] * len(self.cache.lengths)
        # Plain decoding runs no later token.
        self._last_offset = self.max_new_tokens - 2
        self._table_end = self._find_table_end()

    def __enter__(self) -> "TargetSession":
        self._listening.enter_context(self.reader.listening())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._listening.close()
        if self.prompt.keeps_cache:
            if exception[0] is not None:
                # The caller can distinguish from padding only what every row has committed.
                lengths = self.cache.lengths
                shortest = max(min(lengths), self.cache.min_length)
                self.cache.truncate([max(length - shortest, 0) for length in lengths])
            self.cache.restore(self.prompt.cache)
        if self.memory is not None:
            self.memory.give_back(self.model)

    def tokens_computed(self, num_drafts: int) -> float:
        """Returns for how many tokens a pass over `num_drafts` takes time, on average."""
        return num_drafts

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
        make_masks = self.shapes.compiled(_tree_masks, num_nodes)
        masks = make_masks(tree, self.cache, self.dtype, self.traits.windows, attention.omits_masks)
        self.cache.begin_pass(tree)
        mask: Any = next(iter(masks.values()), None)
        if len(masks) > 1:
            mask = dict.fromkeys(STATE_KINDS) | masks  # of layers with states alone nothing is padding
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

    def keep(self, path: Path, output: TargetOutput) -> CommittedTokens:
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
        Returns the tokens that the prefill ran, each with the state before it. Once, as a long prompt's take memory.
        `text` `(B, T + 1)` is the prompt and the first new token; with `inputs_embeds` the new token alone. The
        drafter knows `vocab_size` tokens; a multimodal prompt may mark its images by others.
        """
        read, position_ids, mask = self.prefill.states, text_positions(self.prefill.position_ids), self.prompt.mask
        del self.prefill
        states, read_target = read.target_states, self.reader.read_target
        if read_target is not None and not read.are_read:
            states = read_target(states)
        del read
        # A model that puts an image before the text (GIT) has more states than positions.
        num_known = min(states.shape[1], text.shape[1], position_ids.shape[1])
        return CommittedTokens(
            text[:, -num_known:].clamp(0, vocab_size - 1),
            states[:, -num_known:],
            position_ids[:, -num_known:],
            [num_known] * len(text),
            None if mask is None else mask[:, -num_known:],
        )

    def _keep_entries(self, path: Path) -> None:
        # In a row that has just ended the root is its last token. It stays, as plain decoding runs it while other rows
        # continue.
        num_entries = [
            int(not has_ended) if length == 0 else length
            for length, has_ended in zip(path.accepted_lengths, self._has_ended, strict=True)
        ]
        self._has_ended = [length == 0 for length in path.accepted_lengths]
        self.cache.keep_path(path.nodes, num_entries)

    def finish(self, num_tokens: Sequence[int], new_tokens: torch.Tensor, tree: DraftTree) -> None:
        """
        Leaves in the caller's cache what plain decoding does: of each row `num_tokens` of the `new_tokens` `(B, T)`,
        which end in padding where a row has ended. States have read that padding, too. `tree` is the newest one, for
        its shape. Does nothing if the caller does not get the cache.
        """
        if not self.prompt.keeps_cache:
            return
        if self.cache.states is not None:
            num_tokens = [new_tokens.shape[1] - 1] * len(num_tokens)
        ends = [self.prompt.length + number for number in num_tokens]
        self.cache.truncate([max(now - end, 0) for now, end in zip(self.cache.lengths, ends, strict=True)])
        # Above all the last tokens of rows that ended in the newest pass, before others did.
        while any(now < end for now, end in zip(self.cache.lengths, ends, strict=True)):
            self._run_text(ends, new_tokens, tree)

    def _run_text(self, ends: Sequence[int], new_tokens: torch.Tensor, tree: DraftTree) -> None:
        """Commits more of each row's `new_tokens`, up to `ends[b]` entries, as many as one pass takes."""
        missing = [max(end - now, 0) for now, end in zip(self.cache.lengths, ends, strict=True)]
        longest = longest_path(tree) if self.shapes.are_fixed else NODES_PER_PASS
        lengths = [min(number, longest) for number in missing]
        num_nodes = tree.tokens.shape[1] if self.shapes.are_fixed else max(lengths)
        starts = upload([length - self.prompt.length for length in self.cache.lengths], new_tokens.device)[:, None]
        columns = torch.arange(num_nodes, device=new_tokens.device).expand(len(missing), -1)
        tokens = new_tokens.gather(1, (starts + columns).clamp(max=new_tokens.shape[1] - 1))
        text = single_path(tokens[:, 0], tokens[:, 1:], torch.zeros_like(tokens[:, 1:], dtype=torch.float32))
        if self.shapes.are_fixed:
            text = replace(text, depths=text.depths.clamp(max=tree.max_depth), max_depth=tree.max_depth)
        self.run_tree(text)
        self.cache.keep_path(columns[:, :longest].to(self.device), lengths)

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
        with gqa_without_copies():
            return self.shapes.compiled(_run_model, num_tokens)(self.model, model_inputs | self.traits.unused_outputs)

    def _positions(self, offsets: torch.Tensor) -> torch.Tensor:
        """Returns the positions of tokens `offsets` `(B, n)` after the prompt."""
        # Nodes after the last position are never committed.
        return self.prompt.next_position + offsets.clamp(max=self._last_offset)

    def _find_table_end(self) -> int | None:
        """Returns how many tokens after the prompt have a position in the target's table; `None` if all have one."""
        config = self.traits.config
        size = getattr(config, "max_position_embeddings", None)
        if size is None or getattr(config, "rope_parameters", None):
            return None
        # Of the row whose prompt is the longest.
        num_left = size - int(self.prompt.next_position.max())
        return num_left if num_left <= self._last_offset else None

    @property
    def max_depth(self) -> int | None:
        """
        The depth of a tree's last nodes that have a position in the target's table (learned or sinusoidal positions
        end); `None` if all have one. 0 where the root is the last, or beyond, as plain decoding runs it there, too.
        """
        if self._table_end is None:
            return None
        num_new = max(self.cache.lengths) - self.prompt.length  # the root is the next one
        return max(self._table_end - 1 - num_new, 0)

    def _node_kwargs(self, num_nodes: int) -> dict[str, Any]:
        """Returns the caller's arguments of a pass over `num_nodes` nodes."""
        known = (*ARGUMENTS_OF_PASSES, self.traits.cache_argument)
        kwargs = {name: value for name, value in self.model_kwargs.items() if name not in known}
        for name in self.kwargs_per_token:
            column = kwargs[name]
            kwargs[name] = column.expand(-1, num_nodes, *column.shape[2:])
        return kwargs


def _run_model(model: PreTrainedModel, model_inputs: dict[str, Any]) -> tuple[Any, tuple[CapturedPass, ...]]:
    begin_capture()
    outputs = model(**model_inputs, return_dict=True)
    return outputs, end_capture()


def _tree_masks(
    tree: DraftTree, cache: TreeCache, dtype: torch.dtype, windows: dict[str, int | None], omits_masks: bool
) -> dict[str, torch.Tensor | None]:
    """Returns the mask of a tree for each kind of attention, `None` where it may be omitted and would hide nothing."""
    masks: dict[str, torch.Tensor | None] = {}
    for kind, window in windows.items():
        is_omitted = omits_masks and cache.needs_no_mask(tree.tokens.shape[1], window)
        masks[kind] = None if is_omitted else cache.attention_mask(tree.ancestors, tree.depths, dtype, window)
    return masks


def text_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns `(B, n)`: of several positions per token `(P, B, n)` the first."""
    return position_ids if position_ids.ndim == 2 else position_ids[0]
