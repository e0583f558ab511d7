"""Callbacks of a generation: its stages, its draft trees, and the tokens that each cycle commits."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from ..model.modeling_gumiho import GumihoModel
from ..model.wrappers import as_target
from .drafting.candidate_generator import DraftOrigin
from .tree.draft_tree import DraftTree
from .tree.walk import Path, pick
from .verification.target_memory import memory_of
from .verification.target_states import TargetStates


# "prompt": the target runs the prefill. "draft": a tree is drafted. "drafter_pass": within "draft", a module of the
# drafter or the output head runs; not reported if drafting is compiled. "verify": the target runs a tree.
Stage = Literal["prompt", "draft", "drafter_pass", "verify"]


class GenerationObserver:
    """
    Callbacks of a generation with draft trees; see [`observing`]. Override the methods that you need.

    The methods run in the thread that generates. An exception in them ends the generation. When a stage ends, the
    device may not have finished its work.
    """

    def on_generation_begin(self, batch_size: int) -> None:
        """Called before the prefill of a batch of `batch_size` rows."""

    def on_stage_begin(self, stage: Stage) -> None:
        """Called when a stage begins."""

    def on_stage_end(self, stage: Stage) -> None:
        """Called when a stage ends, also by an exception."""

    def on_tree(self, origin: DraftOrigin) -> None:
        """Called when a draft tree is made, before its cycle. `origin` is where its tokens come from."""

    def on_cycle(self, tree: DraftTree, path: Path) -> None:
        """
        Called when a cycle has committed its tokens, which a streamer has received before. The first token, which the
        prefill predicts, is no cycle.

        Args:
            tree: The draft tree that was verified.
            path: The committed path. Where a text ends within it, the last token is a draft instead of a bonus token.
        """

    def on_prompt(self, input_ids: torch.Tensor, states: TargetStates, mask: torch.Tensor | None) -> None:
        """
        Called after the prefill, with the prompt `(B, P)`, empty where it was given as `inputs_embeds`, the target's
        states of its newest tokens, those that no cache of the caller's had, and a mask `(B, P)` that is false at
        padding, or `None`. The tensors must be copied, not kept.
        """

    def on_states(self, states: TargetStates, counts: Sequence[int]) -> None:
        """
        Called after a cycle, with the target's states of the path's nodes: the text's newest token, and the accepted
        drafts. The tensors must be copied, not kept. Of each row the first `counts[b]` states have a meaning.
        """

    def on_generation_end(self, new_tokens: list[list[int]]) -> None:
        """Called at the end, also after an error, with the new tokens of each row: one more than it has states of."""


# Returns the observer of a call with this drafter, or `None` where the call is not observed.
MakeObserver = Callable[[GumihoModel], GenerationObserver | None]


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.observers: list[MakeObserver] = []


_of_thread = _OfThread()


@contextmanager
def observing(observer: GenerationObserver, target: nn.Module | None = None) -> Iterator[None]:
    """
    Calls the methods of `observer` in all generations that this thread begins within the `with` block, or, with a
    `target`, in all of this target's in any thread. Blocks can be nested or overlap, and end in any order and thread.
    """
    observers = _of_thread.observers if target is None else memory_of(as_target(target)).observers
    make: MakeObserver = lambda drafter: observer  # noqa: E731 (one of its own for each block)
    observers.append(make)
    try:
        yield
    finally:
        observers.remove(make)


def observers_of_call(target: nn.Module, drafter: GumihoModel) -> tuple[GenerationObserver, ...]:
    """Returns the observers of a call that begins."""
    made = [make(drafter) for make in (*_of_thread.observers, *memory_of(target).observers)]
    return tuple(observer for observer in made if observer is not None)


class GenerationEvents:
    """Calls the observers of one generation in the order of registration; at the end of a stage, in reverse order."""

    def __init__(self, observers: tuple[GenerationObserver, ...]):
        self.observers = observers

    def report(self, method: str, *args: Any) -> None:
        """Calls this method of all observers."""
        for observer in self.observers:
            getattr(observer, method)(*args)

    def stage(self, stage: Stage) -> AbstractContextManager[None]:
        """Returns a context manager for the duration of a stage."""
        return self._report_stage(stage) if self.observers else nullcontext()

    @contextmanager
    def _report_stage(self, stage: Stage) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self.observers:
                observer.on_stage_begin(stage)
                stack.callback(observer.on_stage_end, stage)
            yield

    def cycle(self, tree: DraftTree, path: Path) -> None:
        """Reports what a cycle committed, in memory that the next cycle does not overwrite."""
        if self.observers:
            longest = max(path.accepted_lengths)
            nodes, tokens = path.nodes[:, :longest].clone(), path.tokens[:, :longest].clone()
            self.report("on_cycle", tree, Path(nodes, tokens, path.host_tokens))

    def states(self, states: TargetStates, path: Path) -> None:
        """Reports the states of the committed path, of all nodes that the target ran."""
        if self.observers:
            nodes = path.nodes[:, : max(path.accepted_lengths)]
            self.report("on_states", states.map(lambda of_nodes: pick(of_nodes, nodes)), path.accepted_lengths)
