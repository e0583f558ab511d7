"""One pair of models for all answers that are written at the same time: a lock that goes from one to the next."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ModelLock:
    """
    A first-in-first-out lock that its holders hand over after each token or cycle. Each holder draws random numbers of
    its own, so its seed gives the same text whatever others sample meanwhile.

    Args:
        device: The target's device, whose random generator each holder has for itself.

    Attributes:
        is_closed: Whether the page is closed, so that all answers are to stop.
        queue: All who wait; the first one has the lock.
        changed: Is notified when the queue has another first one.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.is_closed = False
        self.changed = threading.Condition()
        self.queue: deque[Hold] = deque()

    @contextmanager
    def hold(self, seed: int) -> Iterator["Hold"]:
        """Waits for the lock and yields the hold on it, whose random generators begin with `seed`."""
        hold = Hold(self)
        try:
            hold.enter()
            torch.manual_seed(seed)
            yield hold
        finally:
            hold.leave()


class Hold:
    """What one answer keeps between its turns: its random numbers and its clock."""

    def __init__(self, lock: ModelLock):
        self._lock = lock
        self._seconds = 0.0
        self._begun: float | None = None  # its turn; none between two turns
        self._random_states: tuple[torch.Tensor, ...] | None = None

    @property
    def seconds(self) -> float:
        """How long it has had the lock, the present turn included."""
        begun = self._begun
        return self._seconds + (0.0 if begun is None else time.perf_counter() - begun)

    def hand_over(self) -> None:
        """Lets everybody else in the queue have one turn first."""
        self.leave()
        self.enter()

    def enter(self) -> None:
        """Waits at the end of the queue until it is the first, and begins a turn."""
        lock = self._lock
        with lock.changed:
            lock.queue.append(self)
            lock.changed.wait_for(lambda: lock.queue[0] is self)
        if self._random_states is not None:
            _set_random_states(lock.device, self._random_states)
        self._begun = time.perf_counter()

    def leave(self) -> None:
        """Ends a turn, so that the next one in the queue has the lock."""
        if self._begun is not None:
            self._seconds, self._begun = self.seconds, None
            self._random_states = _random_states(self._lock.device)
        with self._lock.changed:
            self._lock.queue.remove(self)
            self._lock.changed.notify_all()


def _random_states(device: torch.device) -> tuple[torch.Tensor, ...]:
    states = (torch.get_rng_state(),)
    return states if device.type == "cpu" else (*states, torch.get_device_module(device).get_rng_state(device))


def _set_random_states(device: torch.device, states: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
