"""Continuing a training from a checkpoint."""

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME


class ScheduleOfThisRun(TrainerCallback):
    """Lets a training that continues begin with the learning rate of its own schedule, which may be a longer one."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Computes the rate again, in place of the checkpoint's."""
        scheduler = kwargs["lr_scheduler"]
        if state.global_step and isinstance(scheduler, LambdaLR):
            scheduler.last_epoch -= 1
            scheduler.step()


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """
    Returns the folder of the newest complete checkpoint in `output_dir`, `None` if there is none. `Trainer` writes its
    state last, so a checkpoint with a readable one is complete.
    """
    found = Path(output_dir).glob("checkpoint-*")
    numbered = {int(path.name[11:]): path for path in found if path.name[11:].isdigit()}
    for _, path in sorted(numbered.items(), reverse=True):
        try:
            json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return str(path)
    return None


def gather_when_saving(accelerator: Accelerator) -> None:
    """Lets FSDP and DeepSpeed gather the drafter where it is saved: otherwise they leave parts that nothing loads."""
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    if fsdp is not None and "FULL_STATE_DICT" not in str(fsdp.state_dict_type):
        fsdp.state_dict_config = fsdp.optim_state_dict_config = None  # those of the other kind
        fsdp.set_state_dict_type("FULL_STATE_DICT")
    if deepspeed is not None and deepspeed.zero_stage == 3:
        deepspeed.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
