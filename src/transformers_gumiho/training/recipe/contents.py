"""What the manifests of a run hold: the options and contents that decide its results, by stage and phase."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import GumihoTrainingArguments
from ..data.fingerprint import (
    checkpoint_fingerprint,
    conversations_fingerprint,
    file_fingerprint,
    tokenizer_fingerprints,
)
from ..feature_cache import FeatureDataset
from ..writing.local import own_settings
from .arguments import RecipeArguments
from .context import RunContext
from .target import generation_config


# What locks a result that is not finished: another value would be another drafter. All else may change: batch sizes of
# writing, the engine, devices, logging, saving.
_LOCKS_ANSWERS = (
    "target_dtype", "chat_template_kwargs", "max_prompt_tokens", "max_new_tokens", "max_length",
)  # fmt: skip
_LOCKS_ROWS = ("max_length", "packing", "num_eval_rows", "chat_template_kwargs")
_LOCKS_DRAFTER = (
    "feature_weight", "serial_ce_weight", "parallel_ce_weight", "parallel_ce_start", "parallel_decay",
    "parallel_weight", "feature_noise", "unroll_serial_head", "linear_start", "train_only", "assistant_only_loss",
    "draft_vocabulary_size", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "optim", "optim_args",
    "optim_target_modules", "muon", "neftune_noise_alpha", "seed", "data_seed", "train_sampling_strategy",
    "dataloader_drop_last", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
)  # fmt: skip
# What decides how a drafter is made, whether by an option, by a recipe or by default.
_FIELDS = ("num_serial_tokens", "num_parallel_heads", "transition_rank", "target_layer_ids")


def target_contents(args: RecipeArguments, tokenizer: Any) -> dict[str, Any]:
    """Returns fingerprints of the target and its tokenizer, without loading the target."""
    target = {"target": checkpoint_fingerprint(str(args.target)), "target_dtype": args.target_dtype}
    return target | tokenizer_fingerprints(tokenizer)


def writing_contents(run: RunContext, tokenizer: Any) -> dict[str, Any]:
    """Returns what answers are made from: options, the target's own settings, and the questions."""
    args, rows = run.args, run.rows
    own = generation_config(args)
    return _of(args, _LOCKS_ANSWERS) | tokenizer_fingerprints(tokenizer) | {
        "sampling": asdict(args.sampling(own)),
        "generation_config": own_settings(own),
        "data": None if rows is None else conversations_fingerprint(rows.select_columns("conversation")),
        "num_prompts": args.num_prompts if rows is None else None,
        "openings": None if args.openings is None else file_fingerprint(args.openings),
        "seed": run.seed,
    }  # fmt: skip


def rows_contents(run: RunContext, answers: Path) -> dict[str, Any]:
    """Returns what the training's rows are made from: the answers, and how they are cut into rows."""
    if run.args.regenerate:
        data = file_fingerprint(answers)
    else:
        data = conversations_fingerprint(run.rows.select_columns("contents"))
    return _of(run.args, _LOCKS_ROWS) | {"data": data, "seed": run.seed}


def cached_contents(folders: Sequence[str], num_eval_rows: float) -> dict[str, Any]:
    """Returns what feature caches that a user names were made from."""
    caches = [FeatureDataset(folder).made_from for folder in folders]
    return caches[0] | {"data": [cache.get("data") for cache in caches], "num_eval_rows": num_eval_rows}


def training_contents(run: RunContext, training_args: GumihoTrainingArguments, start: str | None) -> dict[str, Any]:
    """Returns what a phase is made from besides the data: its options, and the drafter that it begins with."""
    values = training_args.to_dict()
    return _of(run.drafter_config, _FIELDS) | {name: values[name] for name in _LOCKS_DRAFTER} | {
        "precision": training_args.mixed_precision,  # the launcher's, too
        "tokens_per_step": training_args.tokens_per_step,
        "rows_per_step": training_args.rows_per_step if training_args.tokens_per_step is None else None,
        "drafter": None if start is None else checkpoint_fingerprint(start),
    }  # fmt: skip


def _of(source: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}
