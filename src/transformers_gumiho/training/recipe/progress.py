"""One line for each log of a training: where it is, how fast, how good, and what it waits for."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback, TrainerState


_FIRST_LINE = 60  # seconds after which the rate is shown, however rarely something is logged
# Begins what transformers says of a checkpoint whose run gave shares of steps, or budgets of tokens.
_MISMATCH = "Warning: The following arguments do not match the ones in the `trainer_state.json`"


@contextmanager
def without_mismatches() -> Iterator[None]:
    """Keeps transformers from comparing a run with its checkpoint, which the run's own record does without errors."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_MISMATCH)

    logger = logging.getLogger("transformers.trainer_utils")
    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


class Progress(TrainerCallback):
    """Prints the progress of a phase, of this name and place, e.g. `serial 1/2`."""

    def __init__(self, phase: str):
        self.phase = phase
        self.trainer: Any = None
        self._begin, self._first_step, self._is_silent, self._has_advised = 0.0, sys.maxsize, True, False

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begins to measure."""
        self._begin, self._first_step = time.perf_counter(), state.global_step

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Prints the rate of the first minute."""
        if self._is_silent and time.perf_counter() - self._begin > _FIRST_LINE:
            self._print(state)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, metrics: Any, **kwargs: Any) -> None:
        """Prints how good the drafter is."""
        length = metrics.get("eval_expected_acceptance_length")
        if length is not None:
            drafts = [f"{metrics[name]:.0%}" for name in sorted(metrics) if name.startswith("eval_agreement_")][:3]
            line = f"{self.phase}  step {state.global_step}: agreement {' '.join(drafts)}"
            line += f", expected {length:.2f} tokens per pass{_place_of(metrics, args, state)}"
            if state.is_world_process_zero:
                tqdm.write(line)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any, **kwargs: Any) -> None:
        """Prints a line where a loss is logged."""
        if "loss" in logs:
            self._print(state, f"  loss {logs['loss']:.3f}")

    def _print(self, state: TrainerState, loss: str = "") -> None:
        done, seconds = state.global_step - self._first_step, time.perf_counter() - self._begin
        if not state.is_world_process_zero or done <= 0:
            return
        self._is_silent = False
        # Those of this process stand for those of the others.
        rate = f"  {self.trainer.num_tokens * self.trainer.args.world_size / seconds:,.0f} tokens/s"
        left = (state.max_steps - state.global_step) * seconds / done
        remaining = f"{left / 3600:.1f} h left" if left >= 3600 else f"{left / 60:.0f} min left"
        tqdm.write(f"{self.phase}  step {state.global_step}/{state.max_steps}{rate}{loss}  {remaining}")
        waiting = self.trainer.seconds_of_waiting / seconds
        if waiting > 0.2 and not self._has_advised:  # otherwise the steps themselves take the time
            self._has_advised = True
            tqdm.write(f"{self.phase}  waits for data in {waiting:.0%} of the time: raise --dataloader_num_workers")


def _place_of(metrics: dict[str, float], args: Any, state: TrainerState) -> str:
    """Returns whether the newest evaluation is the best one, or else how good that is; empty where none is kept."""
    name, best = args.metric_for_best_model, state.best_metric
    if name is None or state.global_step == 0:
        return ""
    value = metrics[name if name.startswith("eval_") else f"eval_{name}"]
    is_best = best is None or (value > best if args.greater_is_better else value < best)
    return " (best)" if is_best else f" (best: {best:.2f})"


class Bar(ProgressCallback):
    """The bar of a training, which leaves what is logged to [`Progress`]."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Prints nothing."""
