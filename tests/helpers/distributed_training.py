"""A tiny training, run by `accelerate launch` in the distributed tests: writes its loss curve and its drafter."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from datasets import IterableDataset
from targets import make_drafter, make_target
from torch.distributed.tensor import DTensor
from trainers import make_args, make_rows

from transformers_gumiho.training import GumihoTrainer


def allow_fsdp_on_cpu() -> None:
    """
    accelerate switches FSDP on for accelerators only. It runs on a CPU all the same, over gloo, when the processes are
    taken for those of a GPU machine.
    """
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def main(folder: Path, batch_size: int, resume: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    target = make_target("llama").float()
    args = make_args(
        folder, max_steps=6, per_device_train_batch_size=batch_size, per_device_eval_batch_size=3,
        gradient_accumulation_steps=4 // batch_size // int(os.environ.get("WORLD_SIZE", "1")),
        save_strategy="steps", save_steps=3, unroll_serial_head=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        allow_fsdp_on_cpu()
    drafter = make_drafter(target)
    rows: Any = make_rows()
    if "stream" in sys.argv:
        rows = IterableDataset.from_generator(make_rows)
    trainer = GumihoTrainer(drafter, args, target=target, train_dataset=rows, eval_dataset=make_rows(7, seed=1))
    trainer.train(resume_from_checkpoint=resume or None)
    metrics = trainer.evaluate()
    trainer.save_model(folder / "final")
    if trainer.is_world_process_zero():
        logs = [
            {k: v for k, v in log.items() if "_feature" in k or "_ce" in k or k == "loss"}
            for log in trainer.state.log_history[:6]
        ]
        sharded = any(isinstance(parameter, DTensor) for parameter in drafter.parameters())
        metrics = {"sharded": sharded} | {
            k: v for k, v in metrics.items() if "agreement" in k or "loss" in k or "length" in k
        }
        (folder / "curve.json").write_text(json.dumps([*logs, metrics]))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    # With PyTorch 2.13 one process in some twenty aborts in the destructors of its gloo threads, after all is done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), resume="resume" in sys.argv)
