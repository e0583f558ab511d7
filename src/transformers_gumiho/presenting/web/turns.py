"""Taking turns: answers that are written at the same time share one pair of models fairly."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Turns:
    """
    Lends a pair of models to one answer at a time, for a token or a cycle: to the one that has had it for the shortest
    time. Who comes later begins level with whoever has had the least, and neither overtakes the others nor waits until
    they are done.

    Args:
        device: The target's, whose random numbers each answer has for itself.
        clock: Returns the time in seconds.

    Attributes:
        is_closed: Whether all visitors have left.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        self.device = device
        self.clock = clock
        self._changed = threading.Condition()
        self._present: list[Turn] = []
        self._waiting: list[Turn] = []
        self._holder: Turn | None = None
        self.is_closed = False

    def close(self) -> None:
        """Ends all answers, and those to come."""
        self.is_closed = True

    @contextmanager
    def join(self, seed: int) -> Iterator["Turn"]:
        """
        Waits for the models, and lends them to this thread until it is done, except where it gives way.

        Args:
            seed: Of the random numbers that it draws.
        """
        turn = Turn(self)
        try:
            # In one go, so that no other answer has the models in between.
            with self._changed:
                turn.head_start = min((other.share for other in self._present), default=0.0)
                self._present.append(turn)
                self.take(turn)
            torch.manual_seed(seed)
            yield turn
        finally:
            with self._changed:
                self._return(turn)
                self._present.remove(turn)

    def take(self, turn: "Turn") -> None:
        """Waits until no one has the models and no one who waits has had them for a shorter time."""
        with self._changed:
            self._waiting.append(turn)
            try:
                self._changed.wait_for(lambda: self._is_next(turn))
            finally:
                self._waiting.remove(turn)
            self._holder = turn
        turn.begin()

    def pass_on(self, turn: "Turn") -> None:
        """Lends the models to whoever has had them for the shortest time, which may be `turn` itself."""
        with self._changed:
            turn.pause()
            if all(turn.share <= other.share for other in self._waiting):
                turn.begin()
                return
            self._return(turn)
            self.take(turn)

    def _is_next(self, turn: "Turn") -> bool:
        return self._holder is None and turn is min(self._waiting, key=lambda other: other.share)

    def _return(self, turn: "Turn") -> None:
        if self._holder is turn:
            turn.pause()
            self._holder = None
            self._changed.notify_all()


class Turn:
    """
    The turns of one answer: how long it has had the models, and where its random numbers are.

    Args:
        turns: Where it takes them.

    Attributes:
        head_start: Seconds that count as if it had had the models already.
    """

    def __init__(self, turns: Turns):
        self._turns = turns
        self.head_start = 0.0
        self._seconds = 0.0
        self._begun: float | None = None
        self._random_state: tuple[torch.Tensor, ...] | None = None

    @property
    def seconds(self) -> float:
        """How long it has had the models, this moment included."""
        begun = self._begun
        return self._seconds + (self._turns.clock() - begun if begun is not None else 0.0)

    @property
    def share(self) -> float:
        """What decides who is next: seconds."""
        return self.head_start + self._seconds

    def give_way(self) -> None:
        """Lets others have the models if it is their turn, and waits until it is its own again."""
        self._turns.pass_on(self)

    def begin(self) -> None:
        """Begins a turn: its random numbers go on where they were."""
        if self._random_state is not None:
            _set_random_state(self._turns.device, self._random_state)
        self._begun = self._turns.clock()

    def pause(self) -> None:
        """Ends a turn."""
        if self._begun is not None:
            self._seconds, self._begun = self.seconds, None
            self._random_state = _random_state(self._turns.device)


def _random_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    states = (torch.get_rng_state(),)
    return states if device.type == "cpu" else (*states, torch.get_device_module(device).get_rng_state(device))


def _set_random_state(device: torch.device, states: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
