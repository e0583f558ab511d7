"""The options of `gumiho data` and `gumiho train`, besides those of the trainer."""

from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import GenerationConfig, Trainer
from transformers.integrations import get_available_reporting_integrations

from ...commands import REQUIRED, UserValueError, as_user_errors, check_limits, option
from ...files import check_folder
from ..arguments import GumihoTrainingArguments
from ..data.open_text import parse_template_kwargs
from ..writing.requests import Sampling


# An accelerator writes and reads texts of this length in the time in which a CPU does those.
_MAX_NEW_TOKENS, _MAX_LENGTH = (2048, 4096) if torch.accelerator.is_available() else (512, 2048)
_TOKENS_PER_PASS = 16_384 if torch.accelerator.is_available() else 2048
_REPORTS = {"mlflow", "tensorboard", "trackio", "wandb"}  # whose libraries are missed here, not after the writing
_ADAPTERS = """\
The command trains drafters, not adapters: leave --lora_rank out. In code, `GumihoTrainer` takes a `PeftModel`:

    gumiho = GumihoModel.from_pretrained("{drafter}", dtype="float32")
    adapted = get_peft_model(gumiho, LoraConfig(r={rank}, target_modules=["q_proj", "v_proj", "fc", "linear"]))
    GumihoTrainer(adapted, args, target=target, train_dataset=dataset).train()"""
STAGES = ["write", "features", "train", "tune", "evaluate"]


@dataclass(kw_only=True)
class WritingArguments:
    """What a target answers, and how."""

    target: str | None = option("Target model: a folder or a name on the Hub.")
    data: str | None = option(
        "Questions that the target answers: a file, a folder or a dataset on the Hub (`name:config:split`); `none` "
        "lets it write its own."
    )
    data_split: str = option("Split of the dataset, if its name has none.", "train")
    num_prompts: int = option("With `--data none`: prompts that the target writes.", 10_000, at_least=1)
    num_rows: int | None = option("Number of rows of the data to read (default: all).", at_least=1)
    target_dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = option(
        "Precision of the target.", "auto"
    )
    device_map: str | None = option("`device_map` for the target, e.g. `auto`; needs a single process.")
    chat_template: Path | None = option("File with a chat template for the target's tokenizer.")
    chat_template_kwargs: str | None = option("""Template arguments as JSON, e.g. '{"enable_thinking": false}'.""")
    openings: Path | None = option(
        "With `--data none`: file with a user's first words in each line; \\n breaks lines."
    )
    writing_batch_size: int = option("Prompts or answers to write at a time.", 32, at_least=1)
    max_prompt_tokens: int = option("Maximum tokens of a prompt that the target writes.", 256, at_least=1)
    max_new_tokens: int = option("Maximum number of tokens of an answer.", _MAX_NEW_TOKENS, at_least=1)
    max_length: int = option("Maximum number of tokens of a row.", _MAX_LENGTH, at_least=2)
    sampled_share: float | None = option(
        "Share of the answers that are sampled (default: all if the target's generation config samples, or else a "
        "quarter); the others are greedy."
    )
    temperature: float | None = option("Temperature of sampled text (default: the target's, or 1).")
    top_p: float | None = option("Nucleus sampling threshold (default: the target's, or 0.95).")
    top_k: int | None = option("Most probable tokens to sample from (default: the target's, or all).")
    endpoint: list[str] | None = option(
        "Addresses of servers that run the target, e.g. http://localhost:8000. ENDPOINT_API_KEY holds their key."
    )
    endpoint_model: str | None = option("Name of the target on the server (default: --target).")
    concurrency: int = option("Requests to the server at a time.", 32, at_least=1)

    def __post_init__(self) -> None:
        check_limits(self)

    @property
    def writes_prompts(self) -> bool:
        """Whether the target writes the prompts, too."""
        return self.data == "none"

    def sampling(self, config: GenerationConfig) -> Sampling:
        """Returns how answers are sampled: as the options say, or else as the target's generation config does."""
        options = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        options["share"] = self.sampled_share
        given = {name: value for name, value in options.items() if value is not None}
        return replace(Sampling.of_target(config), **given)

    def check(self, given: Container[str]) -> None:
        """Raises `ValueError` for options that are missing, or contradict each other or those that are `given`."""
        if self.writes_prompts and "num_rows" in given:
            raise UserValueError("--num_rows has no effect with --data none: use --num_prompts. Leave it out.")
        if self.openings is not None and not self.writes_prompts:
            raise UserValueError("--openings has no effect without --data none. Leave it out.")
        if self.target is None or self.data is None:
            raise UserValueError(
                "Give the target with --target, and the data with --data FILE, --data DATASET or none."
            )
        parse_template_kwargs(self.chat_template_kwargs)  # is refused here rather than after the target is loaded
        check_folder(str(self.target))


@dataclass(kw_only=True)
class DataArguments(WritingArguments):
    """The options of `gumiho data`."""

    output_file: str = option("The new dataset, as JSONL.", REQUIRED)
    tokens_per_pass: int = option("Tokens of prompts that the target reads at a time.", _TOKENS_PER_PASS, at_least=1)
    seed: int = option("Seed for sampling.", 0)


@dataclass(kw_only=True)
class RecipeArguments(WritingArguments):
    """The options of `gumiho train` besides those of `GumihoTrainingArguments`."""

    recipe: Literal["recommended", "published"] = option(
        "Recipe; other defaults here are `published`'s.", "recommended"
    )
    stages: list[str] = option(f"Stages to run, of {' '.join(STAGES)} (default: all).", STAGES)
    restart: str | None = option("Stage, or phase of the training, to begin anew, with all after it.")
    force: bool = option("Continue a result with other options than it was begun with.", False)
    yes: bool = option("Delete what --restart names without asking.", False)
    config: Path | None = option("File with options, e.g. `work/resolved.yaml`.")
    plan: bool = option("Print what the run takes of disk and memory, and stop.", False)
    ignore_plan: bool = option("Start even if that is more than there is, and try no memory.", False)
    regenerate: bool = option("Let the target answer; `false` uses the data's answers.", True)
    features: list[str] | None = option("Feature caches of one target to train on, instead of data.")
    cache_features: Literal["auto", "true", "false"] = option(
        "`true` runs the target once and keeps its states; `false` runs it in every step; `auto` keeps them where the "
        "disk has room and the data is passed more than once.",
        "auto",
    )
    features_dtype: Literal["float64", "float32", "bfloat16", "float16"] = option(
        "Precision of the cached features.", "bfloat16"
    )
    packing: bool | None = option("Put several texts into a row (default: the recipe's).")
    num_proc: int | None = option("Processes that prepare the data.", at_least=1)
    num_eval_rows: float = option(
        "Rows to hold out for evaluation, at most a tenth of the data; or below 1, the share of them.", 128, at_least=0
    )
    drafter: str | None = option("Continue training this drafter; `mtp`: the MTP layer of the target.")
    num_parallel_heads: int | None = option(
        "Parallel heads (default: `--drafter`'s, or 5); an EAGLE head gets them.", at_least=1
    )
    transition_rank: int | None = option(
        "Rank of the parallel heads' transitions (default: the recipe's).", at_least=0
    )
    target_layer_ids: list[int] | None = option(
        "Layers of the target that the serial head reads (default: the last one)."
    )
    lora_rank: int = option("An error, which shows how to train adapters in code.", 0)
    calibrate: bool = option("Fit the draft temperature of each depth after training.", True)
    num_measured_prompts: int = option("Held-out prompts to tune and evaluate with.", 18, at_least=0)
    measured_new_tokens: int = option("Tokens to generate for each of these prompts.", 64, at_least=1)

    def check(self, given: Container[str]) -> None:
        if self.lora_rank:
            raise UserValueError(_ADAPTERS.format(rank=self.lora_rank, drafter=self.drafter or "DRAFTER"))
        if unknown := set(self.stages) - set(STAGES):
            raise UserValueError(f"There is no stage {min(unknown)!r}. Choose from {', '.join(STAGES)}.")
        if self.features is None:
            super().check(given)
        for name in ("data", "num_rows", "openings", "regenerate"):
            if name in given and self.features is not None:
                raise UserValueError(
                    f"--{name} has no effect with --features, which holds prepared data. Leave it out."
                )
        if self.writes_prompts and not self.regenerate:
            raise UserValueError("--regenerate has no effect with --data none, which has no answers. Leave it out.")
        if self.drafter is not None:
            check_folder(self.drafter, has_config=False)


def check_training(args: RecipeArguments, training_args: GumihoTrainingArguments, has_drafter: bool) -> None:
    """Raises `ValueError` for training arguments of a phase that contradict the other options."""
    part = training_args.train_only
    if training_args.resume_from_checkpoint is not None:
        raise UserValueError("A run continues from its newest checkpoint: leave --resume_from_checkpoint out.")
    if training_args.save_only_model:
        raise UserValueError("A run continues from the optimizer's state, too: leave --save_only_model out.")
    if missing := {*training_args.report_to} & (_REPORTS - {*get_available_reporting_integrations()}):
        raise UserValueError(f"--report_to needs a library: install it with `pip install {min(missing)}`.")
    if not training_args.muon and training_args.optim_target_modules is None:  # which are the drafter's
        with as_user_errors():  # of a library that is missing, here rather than after the writing
            Trainer.get_optimizer_cls_and_kwargs(training_args, torch.nn.Linear(1, 1))
    if training_args.linear_start and has_drafter:
        raise UserValueError("--linear_start is for new drafters: leave --drafter or --linear_start out.")
    if part in ("parallel", "transition") and not has_drafter:
        raise UserValueError(
            f"--train_only {part} needs a drafter with a trained serial head: give it with --drafter."
        )
    if args.device_map is not None and training_args.world_size > 1:
        raise UserValueError("--device_map splits the target of one process: start a single process.")
