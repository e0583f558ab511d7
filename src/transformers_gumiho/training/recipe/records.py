"""What the results of a run were made from: the options and contents that decide them, by stage and phase."""

import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ...model.configuration_gumiho import GumihoConfig
from .. import GumihoTrainingArguments
from ..data.fingerprint import (
    checkpoint_fingerprint,
    conversations_fingerprint,
    file_fingerprint,
    tokenizer_fingerprints,
)
from ..data.run_files import Record
from ..feature_cache import MADE_FROM
from ..writing.local import own_settings
from .arguments import RecipeArguments, WritingArguments
from .writing import generation_config


# Options of writing that do not change what is written, or whose content is recorded.
_CONTENTS = {
    "target", "data", "data_split", "num_rows", "chat_template", "openings", "endpoint", "concurrency", "device_map",
}  # fmt: skip
# Training arguments that cannot change the drafter: logging, saving, evaluating, loading, the Hub, devices. What is
# not named here is recorded, so that an option of a later release is not ignored.
_NO_PART = re.compile(
    r"(log|logging|save|eval|hub|ddp|fsdp|deepspeed|torch_compile|torchdynamo|trackio|include|do)(_.*)?"
    r"|dataloader_(?!drop_last).*"
    r"|output_dir|push_to_hub.*|report_to|run_name|project|disable_tqdm|use_cpu|local_rank|accelerator_config"
    r"|parallelism_config|per_device.*|gradient_accumulation_steps|gradient_checkpointing.*|max_steps"
    r"|num_train_epochs|resume_from_checkpoint|metric_for_best_model|greater_is_better"
    r"|batch_eval_metrics|prediction_loss_only|skip_memory_metrics|torch_empty_cache_steps|auto_find_batch_size"
    r"|average_tokens_across_devices|ignore_data_skip|restore_callback_states_from_checkpoint|debug"
    r"|enable_jit_checkpoint|loss_chunk_size|acceptance_max_new_tokens|length_column_name"
)


def target_contents(args: RecipeArguments, tokenizer: Any) -> dict[str, Any]:
    """Returns fingerprints of the target and its tokenizer, without loading the target."""
    target = {"target": checkpoint_fingerprint(str(args.target)), "target_dtype": args.target_dtype}
    return target | tokenizer_fingerprints(tokenizer)


def writing_contents(args: RecipeArguments, tokenizer: Any, rows: Any, seed: int) -> dict[str, Any]:
    """Returns what answers are made from: the target, of one behind a server its name, options, and questions."""
    options = {item.name: getattr(args, item.name) for item in fields(WritingArguments) if item.name not in _CONTENTS}
    own = generation_config(args)
    contents: dict[str, Any] = {"sampling": asdict(args.sampling(own))}
    if args.endpoint is None:
        contents["generation_config"] = own_settings(own)
    else:
        contents["target"] = str(args.endpoint_model or args.target)
    contents |= {
        "data": None if rows is None else conversations_fingerprint(rows),
        "openings": None if args.openings is None else file_fingerprint(args.openings),
    }
    return options | contents | tokenizer_fingerprints(tokenizer) | {"seed": seed, "max_length": args.max_length}


def rows_contents(args: RecipeArguments, answers: Path, rows: Any, seed: int) -> dict[str, Any]:
    """Returns what the training's rows are made from: the answers, and how they are cut into rows."""
    data = file_fingerprint(answers) if args.regenerate else conversations_fingerprint(rows)
    return {
        "data": data, "max_length": args.max_length, "packing": bool(args.packing), "seed": seed,
        "num_eval_rows": args.num_eval_rows, "chat_template_kwargs": args.chat_template_kwargs,
    }  # fmt: skip


def cached_contents(folders: Sequence[str], num_eval_rows: float) -> dict[str, Any]:
    """Returns what feature caches that a user names were made from."""
    caches = [Record(Path(folder) / MADE_FROM).made_from for folder in folders]
    return caches[0] | {"data": [cache.get("data") for cache in caches], "num_eval_rows": num_eval_rows}


def drafter_contents(config: GumihoConfig) -> dict[str, Any]:
    """Returns what decides how a drafter is made, whether by an option, by a recipe or by default."""
    names = ("num_serial_tokens", "num_parallel_heads", "transition_rank", "target_layer_ids")
    return {name: getattr(config, name) for name in names}


def training_contents(
    args: RecipeArguments, training_args: GumihoTrainingArguments, start: str | None
) -> dict[str, Any]:
    """Returns what a phase is made from besides the data: its options, and the drafter that it begins with."""
    values = training_args.to_dict()
    options = {name: value for name, value in values.items() if not _NO_PART.fullmatch(name)}
    if training_args.load_best_model_at_end:  # these choose the drafter
        names = ("metric_for_best_model", "greater_is_better", "eval_strategy", "save_strategy")
        options |= {name: values[name] for name in names}
    return options | {
        "rows_per_step": training_args.rows_per_step,
        "lora_rank": args.lora_rank,
        "drafter": None if start is None else checkpoint_fingerprint(start),
    }  # fmt: skip
