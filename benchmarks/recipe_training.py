"""How long a training has taken, over all runs that it was continued in."""

import json
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from transformers_gumiho.measuring.timing import synchronize


class TrainingClock(TrainerCallback):
    """
    Adds up the seconds of a training that is stopped and continued: what came after its newest checkpoint is done
    again, and counts once.

    Args:
        folder: The training's.

    Attributes:
        seconds: So far.
    """

    def __init__(self, folder: Path):
        self.path = folder / "seconds.json"
        self._before = self._start = 0.0

    @property
    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._start

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        self._before, self._start = known.get(str(state.global_step), 0.0), time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.path.write_text(json.dumps({str(state.global_step): self.seconds}))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before, self._start = self.seconds, time.perf_counter()


class StepClock(TrainerCallback):
    """
    Times each step of a training.

    Attributes:
        seconds: Of each.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize(args.device)
        self.seconds.append(time.perf_counter() - self._start)
