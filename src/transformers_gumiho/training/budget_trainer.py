"""A `Trainer` whose batches stay within budgets of tokens."""

from functools import partial
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler
from transformers import Trainer
from transformers.trainer_utils import has_length

from ..internals import gradients_of_pass
from .arguments import GumihoTrainingArguments
from .batches import SeededLengthGroups, ShareOfBatches, StepBatches, make_loader
from .collator import collate_all
from .data.budget import within_budget
from .feature_cache import row_lengths


class TokenBudgetTrainer(Trainer):
    """
    Loads batches within `tokens_per_step` and `tokens_per_pass`, and each row once, whatever the number of processes.

    `num_tokens` is how many this process has trained on, padding included.
    """

    args: GumihoTrainingArguments
    data_collator: Any
    num_tokens = 0

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        """As `Trainer.get_train_dataloader`, within the budgets of tokens, and with each row once."""
        # Evaluations count the answers alone, whatever is trained on.
        collator, self.data_collator = self.data_collator, self._training_collator()
        try:
            batches = self._training_batches()
            if batches is None:
                return super().get_train_dataloader()
            return make_loader(self.train_dataset, batches, self.data_collator, self.args)
        finally:
            self.data_collator = collator

    def _training_collator(self) -> Any:
        return self.data_collator if self.args.assistant_only_loss else partial(collate_all, self.data_collator)

    def _training_batches(self) -> Sampler | None:
        """Returns the batches of this process, unless they are those of `Trainer`."""
        args, dataset = self.args, self.train_dataset
        place = args.process_index, args.world_size
        if dataset is None or not has_length(dataset):
            return None
        if args.tokens_per_step is not None:
            seed = args.seed if args.data_seed is None else args.data_seed
            lengths = self._lengths_of(dataset)
            return StepBatches(lengths, args.tokens_per_step, args.pass_budget or 1, seed, *place)
        if args.world_size == 1 or args.train_sampling_strategy == "batch_rebalance":
            return None
        rows = self._get_train_sampler(dataset)
        if isinstance(rows, RandomSampler):  # in the order that accelerate gives one process
            rows = SeedableRandomSampler(dataset, data_seed=args.data_seed)
        batches = BatchSampler(rows, args.train_batch_size, args.dataloader_drop_last)
        return ShareOfBatches(batches, *place, args.dataloader_drop_last)

    def _lengths_of(self, dataset: Any) -> list[int]:
        lengths = row_lengths(dataset)
        return [len(row["input_ids"]) for row in dataset] if lengths is None else lengths

    def get_eval_dataloader(self, eval_dataset: Any = None) -> torch.utils.data.DataLoader:
        """As `Trainer.get_eval_dataloader`, within the budget of tokens."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        return self._loader_within_budget(dataset) or super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> torch.utils.data.DataLoader:
        """As `Trainer.get_test_dataloader`, within the budget of tokens."""
        return self._loader_within_budget(test_dataset) or super().get_test_dataloader(test_dataset)

    def _loader_within_budget(self, dataset: Any) -> torch.utils.data.DataLoader | None:
        budget = self.args.pass_budget
        if budget is None or dataset is None or not has_length(dataset):
            return None
        batches = within_budget(range(len(dataset)), self._lengths_of(dataset), budget)
        share = ShareOfBatches(batches, self.args.process_index, self.args.world_size)
        return make_loader(dataset, share, self.data_collator, self.args)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        lengths = row_lengths(dataset) if self.args.train_sampling_strategy == "group_by_length" else None
        if not lengths:
            return super()._get_train_sampler(train_dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        # A step's rows, so that several processes take those that one would.
        return SeededLengthGroups(self.args.rows_per_step, lengths, seed)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        if self.args.train_sampling_strategy == "group_by_length":  # `Trainer` would read the states of all rows
            return SequentialSampler(eval_dataset)
        return super()._get_eval_sampler(eval_dataset)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | None = None) -> Any:
        """As `Trainer.training_step`, for each of the passes of a step."""
        if not isinstance(inputs, list):
            self.num_tokens += inputs["input_ids"].numel()
            return super().training_step(model, inputs, num_items_in_batch)
        losses = []
        for number, batch in enumerate(inputs, 1):
            self.num_tokens += batch["input_ids"].numel()
            with gradients_of_pass(self.accelerator, model, is_last=number == len(inputs)):
                losses.append(super().training_step(model, batch, num_items_in_batch))
        return torch.stack(losses).sum()
