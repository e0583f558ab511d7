"""Arguments and rows for short trainings."""

from pathlib import Path
from typing import Any

import torch

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
