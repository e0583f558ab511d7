"""Callbacks of a generation: its stages, its draft trees, and the tokens that each cycle commits."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ..drafting.candidate_generator import DraftOrigin
from ..tree.draft_tree import DraftTree
from ..tree.walk import AcceptedPath


# "prompt": the target runs the prefill. "draft": a tree is drafted. "drafter_pass": within "draft", a module of the
# drafter or the output head runs; not reported if drafting is compiled. "verify": the target runs a tree.
Stage = Literal["prompt", "draft", "drafter_pass", "verify"]


class GenerationObserver:
    """
    Callbacks of a generation with draft trees; see [`observing`]. Override the methods that you need.

    The methods run in the thread that generates. An exception in them ends the generation. To time a stage,
    synchronize the device first, because its work may be unfinished when the stage ends.
    """

    def on_generation_begin(self, batch_size: int) -> None:
        """Called before the prefill of a batch of `batch_size` rows."""

    def on_stage_begin(self, stage: Stage) -> None:
        """Called when a stage begins."""

    def on_stage_end(self, stage: Stage) -> None:
        """Called when a stage ends, also by an exception."""

    def on_tree(self, origin: DraftOrigin) -> None:
        """Called when a draft tree is made, before its cycle. `origin` is where its tokens come from."""

    def on_cycle(self, tree: DraftTree, path: AcceptedPath) -> None:
        """
        Called when a cycle has committed its tokens, which a streamer has received before. The first token, which the
        prefill predicts, is no cycle.

        Args:
            tree: The draft tree that was verified.
            path: The committed path, as wide as that of the longest row. If a text ends within a drafted path, the
                last token is a draft instead of a bonus token.
        """


@dataclass
class _Registration:
    """An observer while it is observing, then `None`. Copies of a context share the registration."""

    observer: GenerationObserver | None


_REGISTRATIONS: ContextVar[tuple[_Registration, ...]] = ContextVar("gumiho_observers", default=())


@contextmanager
def observing(observer: GenerationObserver) -> Iterator[None]:
    """
    Calls the methods of `observer` in all generations that this thread begins within the `with` block. Blocks can be
    nested or overlap, and end in any order.
    """
    registration = _Registration(observer)
    _REGISTRATIONS.set((*_registrations(), registration))
    try:
        yield
    finally:
        # If the block ends in another thread than it began, the first thread sees the end here.
        registration.observer = None
        _registrations()


def _registrations() -> tuple[_Registration, ...]:
    """Returns the registrations of this context, and drops those that have ended."""
    found = tuple(registration for registration in _REGISTRATIONS.get() if registration.observer is not None)
    if len(found) < len(_REGISTRATIONS.get()):
        _REGISTRATIONS.set(found)
    return found


class GenerationEvents:
    """Calls the observers of one generation in the order of registration; at the end of a stage, in reverse order."""

    def __init__(self, observers: tuple[GenerationObserver, ...]):
        self.observers = observers

    @classmethod
    def begin(cls, batch_size: int) -> "GenerationEvents":
        """Finds the observers of this thread and reports that a generation begins."""
        events = cls(tuple(found.observer for found in _registrations() if found.observer is not None))
        for observer in events.observers:
            observer.on_generation_begin(batch_size)
        return events

    def stage(self, stage: Stage) -> AbstractContextManager[None]:
        """Returns a context manager for the duration of a stage."""
        return self._report_stage(stage) if self.observers else nullcontext()

    def each(self, stage: Stage) -> Callable[[], AbstractContextManager[None]]:
        """Returns a function that makes a context manager for each repetition of a stage."""
        return partial(self._report_stage, stage) if self.observers else nullcontext

    @contextmanager
    def _report_stage(self, stage: Stage) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self.observers:
                observer.on_stage_begin(stage)
                stack.callback(observer.on_stage_end, stage)
            yield

    def tree(self, origin: DraftOrigin) -> None:
        """Reports the origin of the next tree."""
        for observer in self.observers:
            observer.on_tree(origin)

    def cycle(self, tree: DraftTree, path: AcceptedPath) -> None:
        """Reports what a cycle committed, in memory that the next cycle does not overwrite."""
        if not self.observers:
            return
        longest = max(path.accepted_lengths)
        nodes, tokens = (tensor[:, :longest].clone() for tensor in (path.nodes, path.tokens))
        for observer in self.observers:
            observer.on_cycle(tree, AcceptedPath(nodes, tokens, path.accepted_lengths))
