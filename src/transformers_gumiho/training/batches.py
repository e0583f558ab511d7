"""Batches within a budget of padded tokens: what the optimizer sees in a step, and what a device's memory sees."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import seed_worker

from .arguments import GumihoTrainingArguments
from .data.budget import within_budget


_OF_LOSS = ("input_ids", "loss_mask", "position_ids", "hidden_states", "layer_states")  # columns of a batch


class StepBatches(Sampler[list[list[int]]]):
    """
    The steps of a training, in random order: for each, the rows of each pass of one process.

    A step has rows of like `lengths`, at most `tokens_per_step` tokens over all processes, padding included. Every
    process reads it in equally many passes of at most `tokens_per_pass` tokens, of which some are empty where rows are
    few. The rows of a step depend on epoch and `seed`, not on processes or passes. All epochs have as many steps.
    """

    batch_size = 1  # accelerate looks for one

    def __init__(
        self,
        lengths: Sequence[int],
        tokens_per_step: int,
        tokens_per_pass: int,
        seed: int = 0,
        process_index: int = 0,
        num_processes: int = 1,
    ):
        self.lengths, self.tokens_per_step, self.tokens_per_pass = lengths, tokens_per_step, tokens_per_pass
        self.seed, self.process_index, self.num_processes = seed, process_index, num_processes
        # Rows of one rounded length change places between steps. Rounded up, a step stays within its budget.
        self._rounded = [_rounded_up(length) for length in lengths]
        self._num_steps = len(within_budget(range(len(lengths)), self._rounded, tokens_per_step))
        self.epoch = 0
        self.sampler = self  # where accelerate looks for `set_epoch`, whatever it wraps this in

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[list[list[int]]]:
        for rows in self.steps():
            yield self._share(rows)

    def steps(self) -> list[list[int]]:
        """Returns the rows of each step of this epoch, over all processes."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        rows = torch.randperm(len(self.lengths), generator=generator).tolist()
        steps = within_budget(rows, self._rounded, self.tokens_per_step)
        return [steps[number] for number in torch.randperm(len(steps), generator=generator).tolist()]

    def _share(self, rows: list[int]) -> list[list[int]]:
        """Returns the rows of each pass of this process in a step: at most one row less than others have."""
        rows = sorted(rows, key=lambda row: -self.lengths[row])
        rows_per_pass = max(self.tokens_per_pass // self.lengths[rows[0]], 1)
        num_passes = -(-len(rows) // (rows_per_pass * self.num_processes))
        num_parts = num_passes * self.num_processes
        parts = [rows[len(rows) * n // num_parts : len(rows) * (n + 1) // num_parts] for n in range(num_parts)]
        return parts[self.process_index :: self.num_processes]


class ShareOfBatches(Sampler[list[int]]):
    """
    The batches of one process out of `batches`. All processes have equally many: the last ones may be empty, where
    accelerate would repeat rows. With `drop_last`, these batches are left out in all processes.
    """

    batch_size = 1

    def __init__(self, batches: Any, process_index: int, num_processes: int, drop_last: bool = False):
        self.batches, self.process_index, self.num_processes = batches, process_index, num_processes
        self.drop_last = drop_last
        self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch."""
        sampler: Any = getattr(self.batches, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)

    def __len__(self) -> int:
        num_batches = len(self.batches)
        return num_batches // self.num_processes if self.drop_last else -(-num_batches // self.num_processes)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(self.batches)
        for number in range(len(self)):
            place = number * self.num_processes + self.process_index
            yield batches[place] if place < len(batches) else []


class SeededLengthGroups(LengthGroupedSampler):
    """Rows in groups of like length, in an order of each epoch that does not depend on what was drawn before."""

    def __init__(self, rows_at_a_time: int, lengths: list[int], seed: int):
        super().__init__(rows_at_a_time, lengths=lengths)
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch."""
        self.generator = torch.Generator().manual_seed(self.seed + epoch)


@dataclass
class PassCollator:
    """Collates the rows of a pass, or of each pass of a step. A pass without rows has a row that does not count."""

    collate: Callable[..., Any]
    dataset: Any

    def __call__(self, rows: list[Any]) -> Any:
        if rows and isinstance(rows[0], list):
            return [self._batch(of_pass) for of_pass in rows]
        return self._batch(rows)

    def _batch(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        if rows:
            return self.collate(rows)
        batch = self.collate([self.dataset[0]])
        # A user's own columns have no row.
        kept = {name: values if name in _OF_LOSS else values[:0] for name, values in batch.items()}
        return kept | {"loss_mask": torch.zeros_like(batch["loss_mask"])}


class RowsOfPasses(torch.utils.data.Dataset):
    """A dataset whose items are lists of another one's rows."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, rows: list[int]) -> list[Any]:
        return [self.dataset[row] for row in rows]


def make_loader(
    dataset: Any, batches: Sampler, collate: Callable[..., Any], args: GumihoTrainingArguments
) -> DataLoaderShard:
    """Returns a loader of this process's `batches`, which stay on the host: a step may be larger than a pass."""
    return DataLoaderShard(
        RowsOfPasses(dataset) if isinstance(batches, StepBatches) else dataset,
        batch_sampler=batches,
        collate_fn=PassCollator(collate, dataset),
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
    )


def _rounded_up(length: int) -> int:
    """Returns a length that is at most a sixteenth longer, one of few."""
    step = 2 ** max(length.bit_length() - 5, 0)
    return -(-length // step) * step
