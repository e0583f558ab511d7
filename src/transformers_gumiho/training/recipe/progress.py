"""The progress of a phase in lines of a log."""

import logging
import time
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback, TrainerState


def is_no_mismatch(record: logging.LogRecord) -> bool:
    """Whether transformers says something else than that a run gave shares of steps, or budgets of tokens."""
    return not record.getMessage().startswith("Warning: The following arguments do not match the ones in the `trainer")


class Progress(TrainerCallback):
    """Prints the progress of a phase, of this name and place, e.g. `serial 1/2`."""

    def __init__(self, phase: str):
        self.phase = phase
        self.trainer: Any = None
        self._begin, self._first_step = 0.0, 0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begins to measure."""
        self._begin, self._first_step = time.perf_counter(), state.global_step

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, metrics: Any, **kwargs: Any) -> None:
        """Prints how good the drafter is."""
        length = metrics.get("eval_expected_acceptance_length")
        if length is not None and state.is_world_process_zero:
            drafts = [f"{metrics[name]:.0%}" for name in sorted(metrics) if name.startswith("eval_agreement_")][:3]
            line = f"{self.phase}  step {state.global_step}: agreement {' '.join(drafts)}"
            tqdm.write(f"{line}, expected {length:.2f} tokens per pass")

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any, **kwargs: Any) -> None:
        """Prints a line where a loss is logged."""
        done, seconds = state.global_step - self._first_step, time.perf_counter() - self._begin
        if "loss" not in logs or done <= 0 or not state.is_world_process_zero:
            return
        # Those of this process stand for those of the others.
        rate = self.trainer.num_tokens * args.world_size / seconds
        left = (state.max_steps - state.global_step) * seconds / done
        remaining = f"{left / 3600:.1f} h left" if left >= 3600 else f"{left / 60:.0f} min left"
        step = f"{self.phase}  step {state.global_step}/{state.max_steps}"
        tqdm.write(f"{step}  {rate:,.0f} tokens/s  loss {logs['loss']:.3f}  {remaining}")


class Bar(ProgressCallback):
    """The bar of a training, which leaves what is logged to [`Progress`]."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Prints nothing."""
