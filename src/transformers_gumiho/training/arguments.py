"""The settings of a drafter's training."""

from dataclasses import dataclass

from transformers import TrainingArguments

from ..commands import UserValueError, option
from .losses.chunked import DEFAULT_CHUNK_SIZE
from .losses.predictors import LossWeights


# The modules of each part that can be trained alone.
PARTS = {
    "serial": ("layer_fusion", "input_norm", "fc_norm", "fc", "enorm", "hnorm", "layers", "decoder", "norm"),
    "parallel": ("mlp", "transition"),
    "transition": ("transition",),
}


@dataclass
class GumihoTrainingArguments(TrainingArguments):
    """
    `TrainingArguments` with the settings of a drafter's training. The defaults are the published recipe's (arXiv
    2503.10135); those of `TrainingArguments` that the recipe sets differently have its values here.
    """

    output_dir: str = option("Folder of the drafter and its checkpoints.")
    learning_rate: float = option("The initial learning rate of AdamW.", 2e-4)
    adam_beta2: float = option("Beta2 of AdamW.", 0.95)
    warmup_steps: float = option("Steps (or share of all steps) of linear warm-up.", 200)
    max_grad_norm: float = option("Maximum gradient norm.", 0.5)
    per_device_train_batch_size: int = option("Rows per device and step.", 4)
    save_total_limit: int | None = option("Checkpoints to keep: the newest, and the best where one is known.", 2)
    ddp_find_unused_parameters: bool | None = option(
        "Leave as it is: every trained parameter has a gradient in every step.", False
    )
    remove_unused_columns: bool = option("Leave as it is: the loss reads columns that the drafter does not.", False)

    feature_weight: float = option("Weight of smooth L1 between features and states.", 1.0)
    serial_ce_weight: float = option("Weight of the serial head's soft cross-entropy.", 0.1)
    parallel_ce_weight: float = option("Weight of the parallel heads' soft cross-entropy.", 0.1)
    parallel_ce_start: float = option("Share of the training before --parallel_ce_weight counts.", 0.1)
    parallel_decay: float = option("Weight of parallel head i: this to the power of i+1.", 0.8)
    parallel_weight: float = option("Weight of the sum over the parallel heads.", 1 / 9)
    feature_noise: float = option(
        "Width of the uniform noise on the states that the drafter reads, times 512 / row length; none for EAGLE-3.",
        0.2,
    )
    unroll_serial_head: bool = option("Train later serial tokens on the drafter's own features.", False)
    linear_start: bool = option("Begin a new drafter with the best linear map to the next state.", False)
    train_only: str | None = option(
        "Train one part and keep the rest: `serial` (the serial head), `parallel` (the parallel heads and their "
        "transitions) or `transition` (the transitions). Loss weights of the rest then do nothing."
    )
    muon: bool = option("Train matrices with Muon, all else with AdamW, at one rate.", False)
    assistant_only_loss: bool = option(
        "Train on the answers alone; `false` also trains on prompts: right if the target wrote them.", True
    )
    draft_vocabulary_size: int | None = option(
        "Number of tokens that may be drafted: the drafter's own, then the most frequent of the training answers "
        "(default: all)."
    )
    tokens_per_step: int | None = option("Tokens of a step of all processes, padding included.")
    tokens_per_pass: int | None = option(
        "Tokens that a device reads at a time, padding included (default: its part of --tokens_per_step)."
    )
    loss_chunk_size: int = option("Rows of tokens x vocabulary logits to hold at a time.", DEFAULT_CHUNK_SIZE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_only not in (None, *PARTS):
            names = ", ".join(map(repr, PARTS))
            raise UserValueError(f"`train_only` must be one of {names}, or None, got {self.train_only!r}.")
        if self.linear_start and self.train_only in ("parallel", "transition"):
            raise UserValueError(
                f"`linear_start` begins a serial head anew, which `train_only={self.train_only!r}` leaves. Drop one."
            )
        for name in ("draft_vocabulary_size", "loss_chunk_size", "tokens_per_step", "tokens_per_pass"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserValueError(f"`{name}` must be at least 1, got {value}.")
        if self.tokens_per_step is not None and self.gradient_accumulation_steps > 1:
            raise UserValueError(
                f"`gradient_accumulation_steps={self.gradient_accumulation_steps}` counts batches of rows, and "
                f"`tokens_per_step` tokens. Leave it out: `tokens_per_pass` decides how many passes a step has."
            )
        if self.label_smoothing_factor:
            raise UserValueError("`label_smoothing_factor` has no effect: no loss compares with labels. Leave it out.")
        if self.remove_unused_columns:
            raise UserValueError("`remove_unused_columns=True` would drop the loss mask. Leave it `False`.")

    @property
    def rows_per_step(self) -> int:
        """Rows of a step, over its batches and all processes."""
        return self.train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def pass_budget(self) -> int | None:
        """Tokens that a device reads at a time; `None` without a budget."""
        if self.tokens_per_step is None:
            return self.tokens_per_pass
        share = max(self.tokens_per_step // self.world_size, 1)
        return min(share, self.tokens_per_pass or share)

    def loss_weights(self, progress: float = 1.0) -> LossWeights:
        """Returns the weights of the loss terms at this `progress`, a share of the training."""
        only_parallel = self.train_only in ("parallel", "transition")
        started = only_parallel or progress >= self.parallel_ce_start
        return LossWeights(
            feature=self.feature_weight,
            serial_cross_entropy=self.serial_ce_weight,
            parallel_cross_entropy=self.parallel_ce_weight if started else 0.0,
            decay=self.parallel_decay,
            serial=0.0 if only_parallel else 1.0,
            parallel=0.0 if self.train_only == "serial" else self.parallel_weight,
        )
