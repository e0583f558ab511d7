"""
The states of layers (short convolutions, recurrences) in passes over draft trees.

A pass over several nodes leaves them as they are, and keeps what each node would add. When a path is accepted, they
move on to its end: nothing runs again, and each row moves on by its own length. A root alone is plain decoding's step,
which writes the states in place.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...internals import mark_static_address
from ..tree.draft_tree import DraftTree
from ..tree.recurrence import NodeTerms, take_windows, window_places
from ..tree.uploads import upload
from .target_memory import StaticMemory


# Where layers of a cache keep states, by number.
CONVOLUTIONS, RECURRENCES = "conv_states", "recurrent_states"

Key = tuple[str, int, int]  # one of these kinds, the layer of the cache, and the number of the state


@dataclass(frozen=True)
class NodeInputs:
    """
    What a convolution reads in a pass over a tree: its `state` `(B, C, width)` before the root, the `inputs`
    `(B, C, n)` of the nodes, and the tree.
    """

    state: torch.Tensor
    inputs: torch.Tensor
    tree: DraftTree
    places: dict[Any, torch.Tensor]

    def windows(self, width: int) -> torch.Tensor:
        """Returns the newest `width` inputs of each node, `(B, n, width, C)`."""
        num_before, device = self.state.shape[2], self.inputs.device
        key = width, num_before, device
        if key not in self.places:  # all layers of a pass read the same places
            parents, depths = self.tree.parents.to(device), self.tree.depths.to(device)
            every = torch.arange(parents.shape[1], device=device).expand_as(parents)
            self.places[key] = window_places(parents, depths, every, width, num_before)
        joined = torch.cat((self.state.to(self.inputs.dtype), self.inputs), dim=2)
        return take_windows(joined, self.places[key])


@dataclass(frozen=True)
class RootState:
    """What a recurrence reads in a pass over a tree: its state before the root, and the `ancestors` `(B, n, n)`."""

    state: torch.Tensor
    ancestors: torch.Tensor


@dataclass
class _Group:
    """States of one shape: a `buffer` `(layers, B, ...)`, the keys of its parts, and `before`, a copy of it."""

    buffer: torch.Tensor
    keys: list[Key]
    before: torch.Tensor | None = None


class TreeStates:
    """
    The states of the `layers` of the caller's cache, as views of buffers that all move on in one step. `memory`
    allocates buffers that a captured graph reads. With `keeps_prompt`, which takes a copy, [`rewind`] may be called.
    """

    def __init__(self, layers: Sequence[Any], memory: StaticMemory | None, keeps_prompt: bool):
        self._layers, self._memory = layers, memory
        self._tree: DraftTree | None = None  # of the newest pass, until it is settled
        self._added: dict[Key, Any] = {}  # by that pass: what convolutions read, and what recurrences add
        self._places: dict[Any, torch.Tensor] = {}
        alike: dict[Any, dict[Key, torch.Tensor]] = defaultdict(dict)
        for index, layer in enumerate(layers):
            for kind in (CONVOLUTIONS, RECURRENCES):
                for number, state in (getattr(layer, kind, None) or {}).items():
                    if state is not None:
                        alike[kind, state.shape, state.dtype, state.device][kind, index, number] = state
        self._groups = [self._group(states) for states in alike.values()]
        self._prompt = [group.buffer.clone() for group in self._groups] if keeps_prompt else []

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return self._groups[0].buffer.shape[1]

    def _group(self, states: dict[Key, torch.Tensor]) -> _Group:
        buffer = torch.stack(list(states.values()))
        group = _Group(buffer if self._memory is None else self._memory.copy(buffer), list(states))
        self._hand_out(group, group.buffer)
        return group

    def _hand_out(self, group: _Group, buffer: torch.Tensor) -> None:
        for (kind, index, number), state in zip(group.keys, buffer.unbind(), strict=True):
            if self._memory is not None:
                mark_static_address(state)
            getattr(self._layers[index], kind)[number] = state

    def begin_pass(self, tree: DraftTree) -> None:
        """Prepares a pass over `tree`. Undoes a pass of which nothing was kept."""
        self.undo()
        self._tree = tree
        if not self._has_branches:
            # The root is accepted, except after an error, and in rows that have ended.
            for group in self._groups:
                group.before = group.buffer.clone()

    @property
    def _has_branches(self) -> bool:
        return self._tree is not None and self._tree.tokens.shape[1] > 1

    def read(self, key: Key) -> Any:
        """Returns a state for a mixer."""
        kind, index, number = key
        state = getattr(self._layers[index], kind)[number]
        if self._tree is None or not self._has_branches or kind == CONVOLUTIONS:
            return state
        return RootState(state, self._tree.ancestors.to(state.device))

    def write(self, key: Key, value: Any, **options: Any) -> Any:
        """Takes the inputs of a convolution, or what a recurrence returned, from a mixer."""
        kind, index, number = key
        if self._tree is None or not self._has_branches:
            layer = self._layers[index]
            update = layer.update_conv_state if kind == CONVOLUTIONS else layer.update_recurrent_state
            return update(value, number, **options)
        if kind == CONVOLUTIONS:
            value = NodeInputs(getattr(self._layers[index], kind)[number], value, self._tree, self._places)
        elif not isinstance(value, NodeTerms):
            raise RuntimeError(
                f"Layer {index} ran a draft tree as if it were a text: its recurrence was replaced after the call "
                f"began. Put the replacement in place before `generate()`."
            )
        self._added[key] = value
        return value

    def keep(self, path: torch.Tensor, accepted_lengths: Sequence[int]) -> None:
        """Moves the states of each row on along the first `accepted_lengths[b]` nodes of `path` `(B, L)`."""
        lengths = upload(accepted_lengths, path.device)[:, None]
        for group in self._groups:
            device = group.buffer.device
            nodes, counts = path.to(device), lengths.to(device)
            if self._has_branches:
                after = self._convolved if group.keys[0][0] == CONVOLUTIONS else self._recurred
                group.buffer.copy_(after(group, nodes, counts))
            elif min(accepted_lengths) == 0 and group.before is not None:
                is_kept = (counts > 0).view(-1, *[1] * (group.buffer.ndim - 2))
                group.buffer.copy_(group.buffer.where(is_kept, group.before))
        self._forget()

    def _recurred(self, group: _Group, nodes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        terms = NodeTerms.stack([self._added[key] for key in group.keys])
        return terms.state_after(group.buffer, nodes, lengths)

    def _convolved(self, group: _Group, nodes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        assert self._tree is not None
        width, device = group.buffer.shape[-1], group.buffer.device
        inputs = torch.stack([self._added[key].inputs for key in group.keys])
        last = nodes.gather(1, (lengths - 1).clamp(min=0))
        tree = self._tree
        places = window_places(tree.parents.to(device), tree.depths.to(device), last, width, width)
        # The window of a row that takes no node stays where it is.
        places = places.where(lengths[:, :, None] > 0, torch.arange(width, device=device))
        windows = take_windows(torch.cat((group.buffer, inputs.to(group.buffer.dtype)), dim=-1), places)
        return windows.squeeze(-3).transpose(-1, -2)

    def undo(self) -> None:
        """Undoes the newest pass, if nothing of it was kept."""
        for group in self._groups:
            if group.before is not None:
                group.buffer.copy_(group.before)
        self._forget()

    def rewind(self) -> None:
        """Returns to the states after the prompt."""
        self._forget()
        for group, prompt in zip(self._groups, self._prompt, strict=True):
            group.buffer.copy_(prompt)

    def restore(self) -> None:
        """Leaves the states to the caller's layers. Ends the use of this object."""
        self.undo()
        if self._memory is not None:
            self._memory = None  # it is for the next generation
            for group in self._groups:
                self._hand_out(group, group.buffer.clone())

    def _forget(self) -> None:
        self._tree, self._added, self._places = None, {}, {}
        for group in self._groups:
            group.before = None
