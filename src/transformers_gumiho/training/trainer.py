"""The `Trainer` of a drafter."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from ..commands import UserFloatingPointError, UserValueError
from ..generation.verification.target_states import TargetStates
from ..internals import drive_one_device, note_best_metric
from ..model.wrappers import as_target
from . import checks
from .arguments import GumihoTrainingArguments
from .budget_trainer import TokenBudgetTrainer
from .calibration import NUM_POSITIONS, drop_break_even, fit_temperatures, rows_to_fit_on, score_choices
from .checkpoints import ScheduleOfThisRun, gather_when_saving, last_complete_checkpoint
from .collator import GumihoDataCollator
from .data.target_runs import why_not_finite
from .draft_restriction import DraftRestriction
from .feature_cache import TargetFeatures
from .linear_start import start_linearly
from .losses.chunked import chunked_gumiho_loss
from .losses.positions import count_positions
from .losses.predictors import LossWeights, Predictor, predictors
from .model_card import model_card_of
from .muon import muon_of
from .scores import agreement_metrics, score_predictions
from .target_features import OnlineFeatures, add_noise
from .unrolling import unroll_serial_head


class GumihoTrainer(TokenBudgetTrainer):
    """
    Trains a drafter to imitate a frozen target.

    Args:
        model (`GumihoModel`, or a `PeftModel` around one): The drafter. Its token embedding is frozen.
        args (`GumihoTrainingArguments`): The settings.
        target (`PreTrainedModel` or `CachedFeatures`): The target, which runs in every step, or its cached features.
            It is no part of what is trained or saved.
        processing_class: The target's tokenizer, which is saved with the drafter.
        **kwargs: As in `Trainer`. A dataset holds the rows that [`GumihoDataCollator`] describes.

    `evaluate()` reports, besides the loss and its terms, the top-1 `agreement_k` with the target at each draft
    position k, and the `expected_acceptance_length` that these imply.

    Raises:
        TypeError: `args` or `model` is of another type.
        ValueError: The drafter was not made for the target, the rows are of another target than the features, or an
            adapter cannot hold what is to be trained.

    Example:

    ```python
    >>> from tempfile import mkdtemp

    >>> from datasets import Dataset
    >>> from transformers import AutoModelForCausalLM
    >>> from transformers_gumiho import GumihoModel
    >>> from transformers_gumiho.training import GumihoTrainer, GumihoTrainingArguments

    >>> target = AutoModelForCausalLM.from_pretrained("examples/demo_pair/target", dtype="float32")
    >>> drafter = GumihoModel.from_target(target)
    >>> args = GumihoTrainingArguments(mkdtemp(), max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
    >>> rows = Dataset.from_dict({"input_ids": [list(range(20, 40))] * 4})
    >>> trainer = GumihoTrainer(drafter, args, target=target, train_dataset=rows)
    >>> result = trainer.train()  # doctest: +ELLIPSIS
    {'train_runtime': ...}
    >>> result.global_step
    1

    ```
    """

    def __init__(
        self,
        model: nn.Module,
        args: GumihoTrainingArguments,
        *,
        target: PreTrainedModel | TargetFeatures,
        **kwargs: Any,
    ):
        if not isinstance(args, GumihoTrainingArguments):
            raise TypeError(f"`args` must be GumihoTrainingArguments, got {type(args).__name__}.")
        if isinstance(target, nn.Module):
            as_target(target)
        if kwargs.get("compute_loss_func") is not None:
            raise UserValueError("`compute_loss_func` is never called. Override `GumihoTrainer.compute_loss` instead.")
        self.drafter = drafter = checks.drafter_of(model)
        layers = drafter.config.layers_read(target.config)
        self.target_features = OnlineFeatures(target, layers) if isinstance(target, nn.Module) else target
        checks.check_drafter(drafter, self.target_features)
        for name in ("train_dataset", "eval_dataset"):
            checks.check_rows(kwargs.get(name), self.target_features)
        drafter.embed_tokens.requires_grad_(False)
        if drafter.config.is_eagle3:  # the loss takes an output head as it is
            drafter.lm_head.requires_grad_(False)
        if args.linear_start:
            checks.check_starts_linearly(model, drafter)
        if args.train_only is not None:
            checks.freeze_all_but(args.train_only, model, drafter)
        if not drafter.config.has_embedding:
            drafter.adopt_embedding(self.target_features.embedding)
        # The target is on one device, or split over several that are then all its own.
        drive_one_device(args)
        num_positions = checks.num_positions(drafter, self.target_features)
        kwargs.setdefault(
            "data_collator", GumihoDataCollator(drafter.config.get_text_config().vocab_size, num_positions)
        )
        kwargs.setdefault("compute_metrics", lambda scored: agreement_metrics(scored.predictions, self._predictors()))
        kwargs.setdefault("optimizer_cls_and_kwargs", muon_of(args))
        if isinstance(kwargs.get("train_dataset"), torch.utils.data.IterableDataset):
            # Each process reads the stream and takes its rows: rows of different lengths cannot be dispatched.
            args.accelerator_config.dispatch_batches = False
        super().__init__(model=model, args=args, **kwargs)
        gather_when_saving(self.accelerator)
        if self.processing_class is not None:
            drafter.tokenizer = self.processing_class
        # The loss is an average over all positions of a step. Older transformers know only the first of these.
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True
        self.add_callback(ScheduleOfThisRun())
        self.target_features.to(args.device)
        self._restriction = DraftRestriction(self)
        self._broken_states = torch.zeros((), dtype=torch.long, device=args.device)  # of the target, in training
        self._forget_terms()
        self._is_new = True  # nothing was trained yet
        self._positions_per_row = 0  # that are scored, while temperatures are fitted
        checks.check_collator(self.data_collator, args.assistant_only_loss)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Returns the loss of a batch; `num_items_in_batch` `(Q,)` holds the positions of all of its step."""
        states = self.target_features.states(inputs)
        drafter_input = self.drafter_input(states)
        args, config = self.args, self.drafter.config
        if model.training:
            # Looked at where training diverges: asking in every step would wait for the device.
            self._broken_states += (~torch.isfinite(states.last)).sum()
            if not config.is_eagle3 and config.mtp_reads_normed:  # the noise is of the size of normalized states
                drafter_input = add_noise(drafter_input, args.feature_noise, config.get_text_config().hidden_size)
        output = self._forward(
            model,
            inputs,
            drafter_input,
            unroll=unroll_serial_head if args.unroll_serial_head else None,
            serial_only=args.train_only == "serial",
        )
        _, lm_head, draft_head = self._restriction.heads(states.last)
        loss, terms = chunked_gumiho_loss(
            output,
            states.last,
            lm_head,
            inputs["loss_mask"],
            self._loss_weights(self.state.global_step / max(self.state.max_steps, 1)),
            inputs.get("position_ids"),
            counts=num_items_in_batch,
            chunk_size=args.loss_chunk_size,
            draft_head=draft_head,
        )
        if num_items_in_batch is not None:
            # Gradients are averaged over the processes, and this is a process's share of one average.
            loss = loss * self.accelerator.num_processes
        if model.training:
            self._steps_of_terms.add(self.state.global_step)
            for name, term in terms.items():  # a batch's share of the terms of a step
                self._terms[name] = self._terms.get(name, 0) + term
        return (loss, output) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Scores each row of a batch: see [`score_predictions`], and within `calibrate` [`score_choices`]."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            states = self.target_features.states(inputs)
            if not torch.isfinite(states.last).all():
                raise UserFloatingPointError(why_not_finite(states.last.dtype))
            output = self._forward(model, inputs, self.drafter_input(states), unroll=unroll_serial_head)
            scored = output, states.last, self.target_features.lm_head(states.last), inputs["loss_mask"]
            token_ids, _, draft_head = self._restriction.heads(states.last)
            settings: dict[str, Any] = {
                "position_ids": inputs.get("position_ids"),
                "vocabulary": (token_ids, draft_head),
                "chunk_size": self.args.loss_chunk_size,
            }
            if self._positions_per_row:
                settings["positions_per_row"] = self._positions_per_row
                scores = score_choices(*scored, inputs["input_ids"], **settings)
            else:
                scores = score_predictions(*scored, weights=self._loss_weights(), **settings)
        if self.args.pass_budget is not None:  # batches have different numbers of rows
            scores = scores.sum(dim=0, keepdim=True)
        # Without labels, no metrics are computed.
        return None, scores, None if self._positions_per_row else scores[:, 0, 0]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As `Trainer.evaluation_loop`, and leaves the weights as they were."""
        # `bf16_full_eval` rounds the drafter in place: what is trained and saved stays as it was.
        kept = [(parameter, parameter.data) for parameter in self.drafter.parameters()]
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            for parameter, data in kept:
                if parameter.dtype != data.dtype:
                    parameter.data = data

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """
        As `Trainer.train`. `resume_from_checkpoint=True` takes the newest complete checkpoint of `output_dir`: a run
        that is killed while it writes one leaves a broken one. The setting `break_even`, measured with the earlier
        weights, is removed.

        Raises:
            ValueError: There is no complete checkpoint to continue from.
            FloatingPointError: Training diverged, or the target's states are not finite.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise UserValueError(
                    f"There is no complete checkpoint in {self.args.output_dir!r} to go on from. Train with "
                    f"`resume_from_checkpoint=None`, or give the folder of one."
                )
        self._forget_terms()
        self._broken_states.zero_()
        if self.train_dataset is not None:
            checks.check_something_counts(self.train_dataset, self._training_collator(), self._shifts())
        self._restriction.find(resume_from_checkpoint or None)
        if self.args.linear_start and self._is_new and not resume_from_checkpoint:
            start_linearly(self, self.drafter)
        self._is_new = False
        drop_break_even(self.drafter)
        output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        self._check_parameters()
        return output

    def calibrate(self, dataset: Any = None) -> list[float] | None:
        """
        Fits the `draft_temperature` of each depth on texts that were not trained on: under it the target's own choices
        are most likely. Other temperatures make other trees, so a `break_even` that was measured before is removed.

        Args:
            dataset: Rows; by default those of evaluation.

        Returns:
            The temperatures. `None` where no row has a position that counts; the setting then stays.

        Raises:
            ValueError: There are no rows, or several datasets.
        """
        rows = rows_to_fit_on(self.eval_dataset if dataset is None else dataset)
        self._positions_per_row = NUM_POSITIONS // len(rows)
        try:
            table = self.predict(rows).predictions
        finally:
            self._positions_per_row = 0
        temperatures = fit_temperatures(table)
        if temperatures is not None:
            self.drafter.generation_config.draft_temperature = temperatures
            drop_break_even(self.drafter)
        return temperatures

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """
        As `Trainer.log`, with the loss terms averaged over the steps since they were logged last.

        Raises:
            FloatingPointError: A loss term is not finite.
        """
        if "loss" in logs and self._terms:
            sums = self.accelerator.reduce(torch.stack(list(self._terms.values())), "sum")
            means = (sums / len(self._steps_of_terms)).tolist()
            logs |= (found := dict(zip(self._terms, means, strict=True)))
            self._forget_terms()
            if not all(map(math.isfinite, means)):
                raise UserFloatingPointError(self._divergence(f"the loss terms are {found}"))
        super().log(logs, start_time)

    def _forget_terms(self) -> None:
        self._terms, self._steps_of_terms = dict[str, Any](), set[int]()

    def create_model_card(self, **kwargs: Any) -> None:
        """Writes the drafter's model card; arguments as in `Trainer.create_model_card`."""
        if self.is_world_process_zero():
            model_card_of(self, **kwargs).save(f"{self.args.output_dir}/README.md")

    def _forward(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], drafter_input: torch.Tensor, **kwargs: Any
    ) -> Any:
        position_ids = inputs.get("position_ids")
        return model(
            input_ids=inputs["input_ids"][:, 1:],
            hidden_states=drafter_input[:, :-1],
            position_ids=None if position_ids is None else position_ids[:, :-1],
            **kwargs,
        )

    def drafter_input(self, states: TargetStates) -> torch.Tensor:
        """Returns what the drafter reads `(B, T, H_in)`: of states cached for one with more layers, the last."""
        layers = self.drafter.config.layers_read(self.target_features.config)
        return states.last if layers is None else states.target_states

    def _loss_weights(self, progress: float = 1.0) -> LossWeights:
        """Returns the weights of the loss terms; the features of an EAGLE-3 head predict no states of the target."""
        weights = self.args.loss_weights(progress)
        return replace(weights, feature=None) if self.drafter.config.is_eagle3 else weights

    def _predictors(self, in_training: bool = False) -> list[Predictor]:
        config, args = self.drafter.config, self.args
        num_heads, num_unrolled = config.num_parallel_heads, config.num_serial_tokens - 1
        if in_training:
            num_heads = 0 if args.train_only == "serial" else num_heads
            num_unrolled = num_unrolled if args.unroll_serial_head else 0
        return predictors(config.num_serial_tokens, num_heads, num_unrolled, self._loss_weights())

    def _shifts(self) -> list[int]:
        return [predictor.shift for predictor in self._predictors(in_training=True)]

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """Returns `(Q,)`: the positions of a step, over its batches and processes, that each term is averaged over."""
        shifts = self._shifts()
        counts = torch.zeros(len(shifts), dtype=torch.long, device=device)
        passes = [batch for step in batch_samples for batch in (step if isinstance(step, list) else [step])]
        for batch in passes:
            counts += count_positions(batch["loss_mask"], shifts, batch.get("position_ids")).to(device)
        return self.accelerator.reduce(counts, "sum")

    def _evaluate(self, trial: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `Trainer._evaluate`. With `eval_on_start`, the drafter to begin with may be the best one, too."""
        metrics = super()._evaluate(trial, *args, **kwargs)
        if self.state.global_step == 0 and self.args.load_best_model_at_end:
            note_best_metric(self, metrics, trial)
            self._save_checkpoint(self.model, trial)
        return metrics

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # A broken checkpoint never takes the place of a good one.
        self._check_parameters()
        if self.state.best_global_step == 0:  # which `Trainer` takes for none
            first = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-0"
            self.state.best_model_checkpoint = str(first)
        super()._save_checkpoint(*args, **kwargs)

    def _check_parameters(self) -> None:
        """Raises `FloatingPointError` where a trained parameter is not finite."""
        if self.accelerator.reduce(checks.count_broken(self.drafter), "sum"):
            raise UserFloatingPointError(self._divergence("the drafter's parameters are not finite"))

    def _divergence(self, finding: str) -> str:
        if self.accelerator.reduce(self._broken_states, "sum"):
            return why_not_finite(self.target_features.embedding.dtype)
        newest = last_complete_checkpoint(self.args.output_dir)
        kept = f"The newest checkpoint, {newest}, is from before that." if newest else "There is no checkpoint."
        return (
            f"Training diverged at or before step {self.state.global_step}: {finding}. {kept} Lower the learning rate "
            f"or `max_grad_norm`, or train in bf16 instead of fp16."
        )
