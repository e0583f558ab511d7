"""Tiny trainings, run by `accelerate launch` in the distributed tests: each writes its loss curve and its drafter."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from datasets import IterableDataset
from targets import make_drafter, make_target
from torch.distributed.tensor import DTensor
from trainers import make_args, make_rows

from transformers_gumiho.training import GumihoTrainer
from transformers_gumiho.training.recipe.arguments import RecipeArguments
from transformers_gumiho.training.recipe.context import unsplit_models
from transformers_gumiho.training.recipe.phases import Training
from transformers_gumiho.training.recipe.trials import Trial, largest_that_fits


BUDGETS = {"tokens_per_step": 48, "tokens_per_pass": 16}


def allow_fsdp_on_cpu() -> None:
    """
    accelerate switches FSDP on for accelerators only. It runs on a CPU all the same, over gloo, when the processes are
    taken for those of a GPU machine.
    """
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # noqa: SLF001


def train(run: str, folder: Path) -> None:
    """
    Trains with a new trainer and writes into `folder / run`.

    Args:
        run: `alone` has batches of four; `whole` has batches of one, two of them to a step, in each of two processes;
            `resumed` goes on from its first checkpoint; `streamed` has batches of two from a stream; `alone_muon` and
            `muon` are `alone` and `whole` with Muon; `alone_tokens` and `tokens` have steps of 48 tokens in passes of
            16, one of which is empty in one of two processes.
        folder: Of all runs.
    """
    batch_size = {"alone": 4, "alone_muon": 4, "streamed": 2}.get(run, 1)
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    args = make_args(
        folder / run, max_steps=4, per_device_train_batch_size=batch_size, per_device_eval_batch_size=3,
        gradient_accumulation_steps=1 if "tokens" in run else 4 // batch_size // num_processes,
        save_strategy="steps", save_steps=2, unroll_serial_head=True, train_sampling_strategy="sequential",
        muon="muon" in run, **BUDGETS if "tokens" in run else {},
    )  # fmt: skip
    allow_fsdp_on_cpu()
    torch.manual_seed(0)
    with unsplit_models(args):
        target = make_target("llama").float()
        drafter = make_drafter(target)
    rows: Any = make_rows()
    if run == "streamed":
        rows = IterableDataset.from_generator(make_rows)
    trainer = GumihoTrainer(drafter, args, target=target, train_dataset=rows, eval_dataset=make_rows(7, seed=1))
    if run == "resumed":
        with trainer.accelerator.main_process_first():
            if trainer.is_world_process_zero():
                shutil.copytree(folder / "whole" / "checkpoint-2", folder / run / "checkpoint-2")
    trainer.train(resume_from_checkpoint=run == "resumed" or None)
    metrics = trainer.evaluate()
    trainer.save_model(folder / run / "final")
    if trainer.is_world_process_zero():
        logs = [
            {k: v for k, v in log.items() if "_feature" in k or "_ce" in k or k == "loss"}
            for log in trainer.state.log_history[:4]
        ]
        sharded = any(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in drafter.parameters())
        metrics = {"sharded": sharded} | {
            k: v for k, v in metrics.items() if "agreement" in k or "loss" in k or "length" in k
        }
        (folder / run / "curve.json").write_text(json.dumps([*logs, metrics]))
    trainer.accelerator.wait_for_everyone()


def try_passes(folder: Path) -> None:
    """
    Finds what fits, where steps of more than 16 tokens fail in all processes, and where more than three rows fail in
    the second one alone; and writes it into a file.
    """
    args = make_args(folder / "tried", tokens_per_step=128, unroll_serial_head=True)
    allow_fsdp_on_cpu()
    with unsplit_models(args):
        target = make_target("llama").float()

    def step(num_tokens: int) -> None:
        if num_tokens > 16:
            raise torch.OutOfMemoryError
        rows = [{"input_ids": [*range(1, 8), 0] * 2}] * args.world_size
        data = {"train_dataset": rows, "eval_dataset": None}
        run: Any = SimpleNamespace(args=RecipeArguments(), fields={}, folder=folder)
        Training(run, data, lambda: target).try_step(args, num_tokens)

    def write(num_rows: int) -> None:
        if num_rows > 3 and args.process_index == 1:
            raise torch.OutOfMemoryError

    trials = [Trial("serial", step, 64, 16), Trial("write", write, 12, 1, "rows")]
    found = [largest_that_fits(trial, args.device) for trial in trials]
    (folder / f"tried-{args.process_index}.json").write_text(json.dumps(found))


def main(folder: Path, runs: list[str]) -> None:
    torch.set_num_threads(1)
    for run in runs:
        try_passes(folder) if run == "tried" else train(run, folder)
    PartialState().destroy_process_group()
    # With PyTorch 2.13 one process in some twenty aborts in the destructors of its gloo threads, after all is done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
