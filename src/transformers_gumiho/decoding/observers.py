"""Telling others what a generation does, while it does it: its stages, and what each cycle committed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Literal

from ..drafting.pause import DraftOrigin
from ..tree.draft_tree import DraftTree
from ..tree.verification import AcceptedPath


# "prompt": the target reads the prompt. "draft": a tree is drafted. "drafter_pass": within that, a part of the drafter
# or the output head runs; not told where all of drafting is one compiled function. "verify": the target runs a tree.
Stage = Literal["prompt", "draft", "drafter_pass", "verify"]


class GenerationObserver:
    """
    Is told what happens in generations with a draft tree; see [`observing`]. All methods do nothing here.

    They are called in the thread that generates, and an exception in them ends the generation. What a stage gave the
    device to do may not be done at the stage's end: who times stages waits for the device.
    """

    def on_generation_begin(self, batch_size: int) -> None:
        """Is called before the target reads a prompt of `batch_size` rows."""

    def on_stage_begin(self, stage: Stage) -> None:
        """Is called when a stage begins. The stage "drafter_pass" is a part of "draft"."""

    def on_stage_end(self, stage: Stage) -> None:
        """Is called when a stage ends, by an exception as well."""

    def on_cycle(self, tree: DraftTree, path: AcceptedPath) -> None:
        """
        Is called when a cycle has committed its tokens. A streamer gets them afterwards where a greedy path is chosen
        at once, and one by one before where it is chosen token by token (sampling, processors that see the text). The
        choice of the first token, after the prompt, is no cycle.

        Args:
            tree: The draft tree that was verified.
            path: What was committed from it, as wide as the longest row's. Where a text ends within a
                drafted path, the last token is a draft instead of a bonus token.
        """

    def on_tree(self, origin: DraftOrigin) -> None:
        """
        Called when a draft tree is made, before its cycle.

        Args:
            origin: Whether the drafter or the context drafted it, or the drafter is paused.
        """


class _Registration:
    """An observer for as long as it is observing. Copies of a context share the registration."""

    def __init__(self, observer: GenerationObserver):
        self.observer: GenerationObserver | None = observer


_REGISTRATIONS: ContextVar[tuple[_Registration, ...]] = ContextVar("gumiho_observers", default=())


@contextmanager
def observing(observer: GenerationObserver) -> Iterator[None]:
    """
    Tells `observer` of the generations that this thread begins within it. Several observers can be nested or overlap,
    and stop observing in any order.
    """
    registration = _Registration(observer)
    _REGISTRATIONS.set((*_registrations(), registration))
    try:
        yield
    finally:
        # Left in another thread than entered, this is what the first one sees of it.
        registration.observer = None
        _registrations()


def _registrations() -> tuple[_Registration, ...]:
    """Returns this context's registrations, and forgets those that have ended."""
    found = _REGISTRATIONS.get()
    if any(registration.observer is None for registration in found):
        found = tuple(registration for registration in found if registration.observer is not None)
        _REGISTRATIONS.set(found)
    return found


class GenerationEvents:
    """
    Tells the observers of one generation, in the order in which they came; a stage's end in the opposite one.

    Args:
        observers: Those to tell. Without any, telling them does nothing.
    """

    def __init__(self, observers: tuple[GenerationObserver, ...]):
        self.observers = observers

    @classmethod
    def begin(cls, batch_size: int) -> "GenerationEvents":
        """Looks up the observers of this thread and tells them that a generation begins."""
        observers = (registration.observer for registration in _registrations())
        events = cls(tuple(observer for observer in observers if observer is not None))
        for observer in events.observers:
            observer.on_generation_begin(batch_size)
        return events

    def stage(self, stage: Stage) -> AbstractContextManager[None]:
        """Returns a context manager that lasts as long as the stage does."""
        return self._tell_stage(stage) if self.observers else nullcontext()

    def each(self, stage: Stage) -> Callable[[], AbstractContextManager[None]]:
        """Returns what makes such a context manager for a stage that is gone through again and again."""
        return partial(self._tell_stage, stage) if self.observers else nullcontext

    @contextmanager
    def _tell_stage(self, stage: Stage) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self.observers:
                observer.on_stage_begin(stage)
                stack.callback(observer.on_stage_end, stage)
            yield

    def tree(self, origin: DraftOrigin) -> None:
        """Reports where the next tree comes from."""
        for observer in self.observers:
            observer.on_tree(origin)

    def cycle(self, tree: DraftTree, path: AcceptedPath) -> None:
        """Tells what a cycle committed, in memory that the next one does not overwrite."""
        if not self.observers:
            return
        longest = max(path.accepted_lengths)
        nodes, tokens = (tensor[:, :longest].clone() for tensor in (path.nodes, path.tokens))
        for observer in self.observers:
            observer.on_cycle(tree, AcceptedPath(nodes, tokens, path.accepted_lengths))
