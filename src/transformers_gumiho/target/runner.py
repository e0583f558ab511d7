"""Running the target: the prompt as plain decoding does, then a draft tree per pass, with its last hidden states."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig, PreTrainedModel

from ..tree.attention_masks import block_attention_mask, slot_attention_mask
from ..tree.draft_tree import DraftTree
from .cycle_shapes import CycleShapes
from .requirements import attention_types
from .tree_cache import TreeCache


# Slots allocated for new tokens at once; longer generations double the cache when they get there.
MAX_RESERVED_TOKENS = 4096


@dataclass(frozen=True)
class TargetOutput:
    """
    What the target computed for `n` nodes.

    Attributes:
        logits (`(B, n, V)`): For the prompt, of its last token only (`n = 1`).
        last_hidden_state (`(B, T, H)`): After the final norm. `T` is `n`, or the tokens of the prompt that were run.
        position_ids (`(B, T)`): The positions of those states.
        hidden_states: All layers' states `(B, T, H)` where they were asked for.
    """

    logits: torch.Tensor
    last_hidden_state: torch.Tensor
    position_ids: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None


class TargetRunner:
    """
    Runs one generation of the target. A context manager: the hook it needs is gone after it, whatever happens.

    Args:
        model: The target.
        generation_config: As prepared by `generate()`.
        model_kwargs: As prepared by `generate()`, with the cache that the prompt goes through.
        num_nodes (`int`): The most nodes that a pass will have, root included.
        shapes: What the passes over trees run in.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        num_nodes: int,
        shapes: CycleShapes,
    ):
        self.model = model
        self.generation_config = generation_config
        self.model_kwargs = model_kwargs
        self.num_nodes = num_nodes
        self.shapes = shapes
        self._run_model = shapes.compiler(_run_model)
        self._slot_masks = shapes.compiler(_slot_masks)
        self._hook: RemovableHandle | None = None
        self.prompt_cache = model_kwargs["past_key_values"]
        self.cache: TreeCache  # takes the prompt's place from the first tree on
        self._has_tree_cache = False
        self.prompt_mask: torch.Tensor | None = model_kwargs.get("attention_mask")
        self.attention_types = attention_types(model)
        config = model.config.get_text_config(decoder=True)
        # Without a rotary embedding the positions come from a table.
        self.num_positions: int | None = (
            None if getattr(config, "rope_parameters", None) else getattr(config, "max_position_embeddings", None)
        )
        self.window: int | None = config.sliding_window if "sliding_attention" in self.attention_types else None

    def __enter__(self) -> "TargetRunner":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
        if self._has_tree_cache:
            if exception[0] is not None:
                # What every row has committed is all that the caller can tell from padding.
                self.cache.set_lengths([min(self.cache.lengths)] * len(self.cache.lengths))
            self.cache.to_dynamic(self.prompt_cache)

    def read_prompt(self, input_ids: torch.Tensor, max_new_tokens: int) -> TargetOutput:
        """Runs the prompt as plain `generate()` does, and all of it through all layers."""
        self.max_new_tokens = max_new_tokens
        config = self.model.config.get_text_config(decoder=True)
        if getattr(config, "num_kv_shared_layers", 0) and "logits_to_keep" in self.model_kwargs:
            # With a number here, decoders whose last layers read the keys and values of earlier ones run these on the
            # last token alone; the drafter wants the states of the whole prompt.
            self.model_kwargs["logits_to_keep"] = torch.tensor([-1])
        position_ids = self.model_kwargs["position_ids"]
        decoder = self.model.get_decoder()
        with _capture_last_hidden_states(decoder) as states:
            outputs = self.model._prefill(input_ids, self.generation_config, self.model_kwargs)
        if not states:
            raise RuntimeError(
                f"{type(self.model).__name__} did not run its decoder as a module, so its last hidden states could "
                f"not be read. If its forward pass is compiled, pass the model that is not."
            )
        last_hidden_state = torch.cat(states, dim=1)  # one for each chunk of a chunked prefill
        batch_size, num_read = last_hidden_state.shape[:2]
        # A quantised target computes in another dtype than it stores.
        self.mask_dtype = last_hidden_state.dtype
        # A target split over devices moves its inputs itself; the parameters of an offloaded one are nowhere.
        self.device = last_hidden_state.device
        position_ids = position_ids.to(self.device)

        self.prompt_length = self.prompt_cache.get_seq_length()
        # A cache of fixed shapes never grows.
        reserved = max_new_tokens if self.shapes.are_fixed else min(max_new_tokens, MAX_RESERVED_TOKENS)
        capacity = self.shapes.slots_for(self.prompt_length + reserved + self.num_nodes)
        self.cache = TreeCache.from_dynamic(self.prompt_cache, capacity)
        self._has_tree_cache = True
        self._hook = decoder.register_forward_hook(keep_last_hidden_state, with_kwargs=True)
        if self.prompt_mask is not None and bool(self.prompt_mask.all()):
            self.prompt_mask = None
        self.context_mask = self.prompt_mask.to(self.device).bool() if self.prompt_mask is not None else None
        if self.shapes.are_fixed:
            self.cache.fix_shapes(self.device)
            self._extend_context_mask(self.cache.capacity)
        # Multimodal decoders have several positions per token, with the batch in the second dimension.
        self.next_position = position_ids[..., -1:].expand(*position_ids.shape[:-2], batch_size, 1) + 1
        text_positions = position_ids if position_ids.ndim == 2 else position_ids[0]
        return TargetOutput(
            logits=outputs.logits[:, -1:],
            last_hidden_state=last_hidden_state,
            position_ids=text_positions[:, -num_read:].expand(batch_size, -1),
            hidden_states=outputs.hidden_states,
        )

    def run_tree(self, tree: DraftTree) -> TargetOutput:
        """Runs all nodes of `tree`, root included, each seeing the committed context and its own ancestors."""
        if self.shapes.are_compiled:
            # What captured graphs returned in the cycle before may be overwritten from here on.
            torch.compiler.cudagraph_mark_step_begin()
        tree = tree.to(self.device)
        if self.cache.starts is not None:
            advanced: int | torch.Tensor = self.cache.starts - self.prompt_length
        elif self.cache.is_uniform:
            advanced = self.cache.lengths[0] - self.prompt_length
        else:
            advanced = self.cache.row_starts(self.device) - self.prompt_length
        # Nodes past the last position that plain decoding would run are never committed; a target with a table of
        # positions may have none for them.
        position_ids = self.next_position + (advanced + tree.depths).clamp_(max=self.max_new_tokens - 2)
        if self.num_positions is not None:
            position_ids = position_ids.clamp_(max=self.num_positions - 1)
        model_inputs = self.model.prepare_inputs_for_generation(
            tree.tokens,
            **self._node_kwargs(tree.tokens.shape[1]),
            past_key_values=self.cache,
            attention_mask=self._attention_mask(tree),
            position_ids=position_ids,
        )
        self.cache.last_hidden_state = None
        outputs = self._run_model(self.model, model_inputs)
        last_hidden_state = self.cache.last_hidden_state
        if last_hidden_state is None:
            raise RuntimeError(f"{type(self.model).__name__} did not hand its cache to its decoder.")
        return TargetOutput(
            logits=outputs.logits,
            last_hidden_state=last_hidden_state,
            position_ids=position_ids if position_ids.ndim == 2 else position_ids[0],
            hidden_states=outputs.hidden_states,
        )

    def commit(self, counts: list[int], nodes: torch.Tensor) -> None:
        """Keeps the first `counts[b]` of `nodes[b]` in the cache."""
        self.cache.commit(counts, nodes)

    def truncate(self, num_removed: Sequence[int]) -> None:
        """Drops the newest `num_removed[b]` entries of each row from the cache."""
        self.cache.set_lengths(
            [length - number for length, number in zip(self.cache.lengths, num_removed, strict=True)]
        )

    def _node_kwargs(self, num_nodes: int) -> dict[str, Any]:
        """Returns the arguments of the caller that go to every pass, extended to `num_nodes` nodes where needed."""
        handled = ("past_key_values", "attention_mask", "position_ids", "inputs_embeds", "logits_to_keep")
        kwargs = {name: value for name, value in self.model_kwargs.items() if name not in handled}
        if (token_type_ids := kwargs.get("token_type_ids")) is not None:
            kwargs["token_type_ids"] = token_type_ids[:, -1:].expand(-1, num_nodes)
        if (token_type_ids := kwargs.get("mm_token_type_ids")) is not None:
            kwargs["mm_token_type_ids"] = token_type_ids.new_zeros(token_type_ids.shape[0], num_nodes)
        return kwargs

    def _attention_mask(self, tree: DraftTree) -> torch.Tensor | dict[str, torch.Tensor]:
        """Returns the mask of a tree; one for each kind of attention where the target mixes them."""
        windows = {kind: self.window if kind == "sliding_attention" else None for kind in self.attention_types}
        if self.cache.starts is not None:
            masks = self._slot_masks(tree, self.cache, self.mask_dtype, self.context_mask, windows)
        else:
            lengths = self.cache.lengths
            self._extend_context_mask(max(lengths))
            masks = {
                kind: block_attention_mask(
                    tree.ancestors, tree.depths, lengths, self.mask_dtype, self.context_mask, window
                )
                for kind, window in windows.items()
            }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _extend_context_mask(self, num_slots: int) -> None:
        """Makes the mask cover so many slots: everything after the prompt is seen."""
        if self.context_mask is not None and self.context_mask.shape[1] < num_slots:
            missing = num_slots - self.context_mask.shape[1]
            self.context_mask = nn.functional.pad(self.context_mask, (0, missing), value=True)


def _run_model(model: PreTrainedModel, model_inputs: dict[str, Any]) -> Any:
    return model(**model_inputs, return_dict=True)


def _slot_masks(
    tree: DraftTree,
    cache: TreeCache,
    dtype: torch.dtype,
    context_mask: torch.Tensor | None,
    windows: dict[str, int | None],
) -> dict[str, torch.Tensor]:
    """Returns the mask of a tree for each kind of attention, over all slots of a cache of fixed shapes."""
    starts = cache.fixed_starts
    return {
        kind: slot_attention_mask(tree.ancestors, tree.depths, starts, cache.capacity, dtype, context_mask, window)
        for kind, window in windows.items()
    }


def keep_last_hidden_state(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any = None) -> None:
    """
    A forward hook for the decoder that leaves its last hidden state with the [`TreeCache`] of the pass. As the cache
    is an argument of the pass, generations in several threads do not meet, and a compiled pass stays the same.
    """
    if output is None:
        # While another thread adds or removes its hook, PyTorch may call that one without the keyword arguments. This
        # thread's own is called as well.
        return
    cache = kwargs.get("past_key_values")
    if isinstance(cache, TreeCache):
        cache.last_hidden_state = output[0]


@contextmanager
def _capture_last_hidden_states(decoder: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yields a list that receives the last hidden state of each pass that this thread makes through `decoder`."""
    states: list[torch.Tensor] = []
    thread = threading.get_ident()

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        # Another thread may be generating on the same model; its passes go to its own hook.
        if threading.get_ident() == thread:
            states.append(output[0])

    handle = decoder.register_forward_hook(hook)
    try:
        yield states
    finally:
        handle.remove()
