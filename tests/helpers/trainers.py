"""Arguments and rows for short trainings."""

from pathlib import Path
from typing import Any

import torch
from targets import make_drafter
from transformers import TrainerCallback

from transformers_gumiho.training import GumihoTrainer, GumihoTrainingArguments


def make_rows(num_rows: int = 24, seed: int = 0, length: int = 16) -> list[dict[str, Any]]:
    """Rows of several lengths, of which different numbers of positions count."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(num_rows):
        ids = torch.randint(1, 8, (length - index % 5,), generator=generator).tolist()
        rows.append({"input_ids": ids, "loss_mask": [int(token > index % 4) for token in ids]})
    return rows


def make_args(folder: Path, **settings: Any) -> GumihoTrainingArguments:
    defaults = {
        "max_steps": 4, "logging_steps": 1, "use_cpu": True, "report_to": "none", "save_strategy": "no",
        "learning_rate": 1e-2, "warmup_steps": 0, "parallel_ce_start": 0, "feature_noise": 0.0,
        "disable_tqdm": True,
    }  # fmt: skip
    return GumihoTrainingArguments(output_dir=str(folder), **defaults | settings)


def losses_of(trainer: GumihoTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def make_trainer(target: Any, folder: Path, drafter: Any = None, **settings: Any) -> GumihoTrainer:
    """A trainer on some rows, with these arguments of it and of the training."""
    names = ("train_dataset", "eval_dataset", "callbacks", "processing_class", "data_collator")
    kwargs = {"train_dataset": make_rows(), "eval_dataset": make_rows(6, seed=1)}
    kwargs |= {name: settings.pop(name) for name in names if name in settings}
    drafter = drafter if drafter is not None else make_drafter(target)
    return GumihoTrainer(drafter, make_args(folder, **settings), target=target, **kwargs)


def trained(*args: Any, **settings: Any) -> GumihoTrainer:
    """What `make_trainer` makes of these arguments, after its training."""
    trainer = make_trainer(*args, **settings)
    trainer.train()
    return trainer


def pack_pairs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts two rows each into one."""
    packed = []
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        row = {name: [*first[name], *second[name]] for name in first}
        packed.append(row | {"position_ids": [*range(len(first["input_ids"])), *range(len(second["input_ids"]))]})
    return packed


class Killed(Exception):
    """What `KillAt` raises."""


class KillAt(TrainerCallback):
    """Ends a training after a step, as a power cut does."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed
