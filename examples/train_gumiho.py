"""Trains a Gumiho drafter for any target on any conversations, and leaves it ready for `generate()`.

    python examples/train_gumiho.py --target_model NAME --dataset_name NAME_OR_FILE --output_dir DIR --bf16

The dataset has `messages`, `conversations`, `prompt` and `completion`, or `text`; a file is `.jsonl`, `.json` or
`.parquet`. All options of `TrainingArguments` are there, too. A run that was stopped goes on from its newest
checkpoint when it is started again. For several devices: `accelerate launch examples/train_gumiho.py ...`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from transformers_gumiho import GumihoModel
from transformers_gumiho.model.configuration_gumiho import resolve_layer_ids
from transformers_gumiho.text_files import read_text
from transformers_gumiho.training import (
    CachedFeatures,
    FeatureDataset,
    GumihoTrainer,
    GumihoTrainingArguments,
    collect_prompts,
    last_complete_checkpoint,
    load_conversations,
    prepare_dataset,
)
from transformers_gumiho.user_errors import told_in_one_line


@dataclass
class ScriptArguments:
    target_model: str | None = field(default=None, metadata={"help": "The target: a folder or a name on the Hub."})
    target_dtype: str = field(default="auto", metadata={"help": "The target's precision."})
    target_device_map: str | None = field(
        default=None, metadata={"help": "`auto` splits the target over all devices; needs a single process."}
    )
    drafter: str | None = field(default=None, metadata={"help": "Train this drafter on, instead of a new one."})
    transition_rank: int | None = field(
        default=None,
        metadata={
            "help": "Rank of the parallel heads' transitions; with `--drafter` and `--train_only transition` they are "
            "added to a drafter that is there. By default the drafter's own, and none of a new one."
        },
    )
    target_layer_ids: list[int] | None = field(
        default=None,
        metadata={
            "help": "Layers of the target that the serial head reads, besides or instead of the last one (-1); with "
            "`--drafter` they are added to a drafter that is there. By default the drafter's own, and the last one of "
            "a new one."
        },
    )
    lora_rank: int = field(default=0, metadata={"help": "Train LoRA adapters of this rank instead of all weights."})

    dataset_name: str | None = field(default=None, metadata={"help": "A file, a folder, or a name on the Hub."})
    dataset_split: str = "train"
    streaming: bool = field(default=False, metadata={"help": "Read the data while training; needs `--max_steps`."})
    features_dir: list[str] | None = field(
        default=None,
        metadata={
            "help": "Train on features that `extract_features.py` or `synthesize_data.py` wrote and not on a dataset: "
            "one folder, or several of one target."
        },
    )
    chat_template: Path | None = field(default=None, metadata={"help": "A file with a template for the tokenizer."})
    max_length: int | None = field(default=None, metadata={"help": "Longest row in tokens (default: 2048)."})
    num_proc: int | None = field(default=None, metadata={"help": "Processes to prepare the data with."})
    packing: bool = field(default=True, metadata={"help": "Put several texts into a row, instead of padding."})
    num_eval_rows: int = field(
        default=128,
        metadata={"help": "Rows at the front of the data that are held out; of a file, at most a tenth of it."},
    )
    calibrate: bool = field(
        default=True,
        metadata={
            "help": "Fit the draft temperature of each depth on the rows held out, when training has ended. With "
            "`false`, and with `--lora_rank`, the drafter keeps its own setting: adapters hold none."
        },
    )
    num_acceptance_prompts: int = field(
        default=16, metadata={"help": "Held-out prompts on which tau is measured every `--acceptance_steps` steps."}
    )


@contextmanager
def whole_models(args: GumihoTrainingArguments) -> Iterator[None]:
    """
    Keeps DeepSpeed's ZeRO-3 from splitting models as they are made. The trainer splits the drafter; the target, which
    DeepSpeed does not run, stays whole.
    """
    unset_hf_deepspeed_config()
    yield
    if args.deepspeed_plugin is not None:
        args.deepspeed_plugin.set_deepspeed_weakref()


def check_options(args: ScriptArguments, training_args: GumihoTrainingArguments) -> None:
    """Refuses options that contradict each other, or that would have no effect."""
    if args.num_eval_rows < 0 or args.lora_rank < 0:
        raise SystemExit("--num_eval_rows and --lora_rank must not be negative.")
    if args.features_dir is not None:
        given = {
            "--dataset_name": args.dataset_name, "--streaming": args.streaming, "--chat_template": args.chat_template,
            "--max_length": args.max_length, "--acceptance_steps": training_args.acceptance_steps,
            "--packing false": not args.packing,
        }  # fmt: skip
        if useless := [name for name, value in given.items() if value]:
            raise SystemExit(f"--features_dir holds prepared data and no prompts: leave {', '.join(useless)} out.")
    elif args.target_model is None or args.dataset_name is None:
        raise SystemExit("Give the target with --target_model and the data with --dataset_name, or --features_dir.")
    if args.streaming and training_args.max_steps <= 0:
        raise SystemExit("--streaming needs --max_steps: a stream does not say how long it is.")
    if args.streaming and training_args.draft_vocabulary_size is not None and args.drafter is None:
        raise SystemExit("--draft_vocabulary_size is counted before training, and --streaming reads while training.")
    if args.lora_rank and args.drafter is None:
        raise SystemExit("--lora_rank trains adapters of a drafter that is there: give it with --drafter.")
    if args.lora_rank and training_args.train_only:
        raise SystemExit("--train_only trains a part of the drafter itself: leave --lora_rank or it out.")
    if args.lora_rank and args.transition_rank:
        raise SystemExit("Adapters do not hold transitions: train these without --lora_rank, on the merged drafter.")
    if args.lora_rank and args.target_layer_ids is not None:
        raise SystemExit("Adapters do not hold the fusion of layers: train it without --lora_rank, on the merged one.")
    if training_args.linear_start and args.drafter is not None:
        raise SystemExit("--linear_start is for new drafters: leave --drafter or it out.")
    if training_args.train_only in ("parallel", "transition") and args.drafter is None:
        raise SystemExit(
            f"--train_only {training_args.train_only} trains on top of a serial head that is there: give its drafter "
            f"with --drafter."
        )
    if args.target_device_map is not None and training_args.world_size > 1:
        raise SystemExit("--target_device_map splits the target of one process; start a single one.")


def load_target(args: ScriptArguments) -> PreTrainedModel:
    """Loads the target, split over the devices where that is asked for."""
    kwargs = {} if args.target_device_map is None else {"device_map": args.target_device_map}
    return AutoModelForCausalLM.from_pretrained(args.target_model, dtype=args.target_dtype, **kwargs)


def cached_data(args: ScriptArguments, target: PreTrainedModel | None) -> dict[str, object]:
    """Returns the trainer's arguments for training on cached features."""
    caches = [FeatureDataset(folder, target) for folder in args.features_dir]
    if len({cache.manifest.fingerprints["data"] for cache in caches}) < len(caches):
        raise SystemExit("--features_dir names caches of the same texts. Give each of them once.")
    rows = torch.utils.data.ConcatDataset(caches)
    # Of each cache its share, from its beginning.
    num_eval = min(args.num_eval_rows, len(rows) // 10)
    held_out = [
        index
        for start, cache in zip([0, *rows.cumulative_sizes], caches, strict=False)
        for index in range(start, start + num_eval * len(cache) // len(rows))
    ]
    trained = sorted({*range(len(rows))} - {*held_out})
    return {
        "target": CachedFeatures(args.features_dir[0]),
        "eval_dataset": torch.utils.data.Subset(rows, held_out) if held_out else None,
        "train_dataset": torch.utils.data.Subset(rows, trained),
        "processing_class": AutoTokenizer.from_pretrained(Path(args.features_dir[0]) / "target"),
    }


def online_data(args: ScriptArguments, target: PreTrainedModel, training_args: GumihoTrainingArguments) -> dict:
    """Returns the trainer's arguments for running the target in every step."""
    tokenizer = AutoTokenizer.from_pretrained(args.target_model)
    if args.chat_template is not None:
        tokenizer.chat_template = read_text(args.chat_template)
    dataset = load_conversations(args.dataset_name, args.dataset_split, args.streaming)
    if args.streaming:
        held_out, dataset = dataset.take(args.num_eval_rows), dataset.skip(args.num_eval_rows)
        num_eval = args.num_eval_rows
    else:
        num_eval = min(args.num_eval_rows, len(dataset) // 10)
        held_out, dataset = dataset.select(range(num_eval)), dataset.select(range(num_eval, len(dataset)))
    max_length = 2048 if args.max_length is None else args.max_length
    settings = {"max_length": max_length, "packing": args.packing, "num_proc": args.num_proc}
    try:
        train_dataset, report = prepare_dataset(dataset, tokenizer, target.config, **settings)
    except ValueError as error:
        raise ValueError(f"The data after the {num_eval} rows held out (--num_eval_rows): {error}") from error
    if args.streaming:
        train_dataset = train_dataset.shuffle(seed=training_args.seed, buffer_size=1000)
    elif training_args.process_index == 0:
        print(f"training data (rows are counted after the {num_eval} held out): {report}")
    eval_dataset = None
    if num_eval:
        try:
            eval_dataset, eval_report = prepare_dataset(held_out, tokenizer, target.config, **settings)
        except ValueError as error:
            raise ValueError(f"The {num_eval} rows that are held out (--num_eval_rows): {error}") from error
        if not args.streaming and training_args.process_index == 0:
            print(f"held out: {eval_report}")
    prompts = collect_prompts(held_out, tokenizer, args.num_acceptance_prompts)
    if training_args.acceptance_steps and not prompts:
        raise SystemExit(f"--acceptance_steps needs prompts, and none of the {num_eval} rows held out has one.")
    return {
        "target": target,
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "acceptance_prompts": prompts if training_args.acceptance_steps else None,
        "processing_class": tokenizer,
        "report": report,
    }


def make_drafter(args: ScriptArguments, source: PreTrainedModel | CachedFeatures) -> torch.nn.Module:
    """Returns the drafter to train, in float32: mixed precision is the trainer's affair."""
    layers = args.target_layer_ids
    layers = None if layers is None else resolve_layer_ids(source.config, layers)
    fields = {"transition_rank": args.transition_rank, "target_layer_ids": layers}
    fields = {name: value for name, value in fields.items() if value is not None}
    if args.drafter is not None:
        drafter = GumihoModel.from_pretrained(args.drafter, dtype=torch.float32, **fields)
    elif isinstance(source, CachedFeatures):
        drafter = source.make_drafter(**fields).float()
    else:
        drafter = GumihoModel.from_target(source, **fields).float()
    if not args.lora_rank:
        return drafter
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc", "linear"]
    return get_peft_model(drafter, LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules=names))


def main() -> None:
    with told_in_one_line("train_gumiho.py"):
        args, training_args = HfArgumentParser(
            (ScriptArguments, GumihoTrainingArguments)
        ).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    check_options(args, training_args)
    if not args.packing and not args.streaming:
        training_args.train_sampling_strategy = "group_by_length"
    main_process = training_args.process_index == 0
    # Only what comes before the training: an error within it is worth its traceback.
    with told_in_one_line("train_gumiho.py"), whole_models(training_args):
        target = load_target(args) if args.target_model else None
        if target is None or args.features_dir is not None:
            data = cached_data(args, target)
        else:
            with training_args.main_process_first(desc="preparing the data"):
                data = online_data(args, target, training_args)
        drafter = make_drafter(args, data["target"])
    report = data.pop("report", None)
    with told_in_one_line("train_gumiho.py"):
        trainer = GumihoTrainer(drafter, training_args, **data)

    checkpoint = training_args.resume_from_checkpoint or last_complete_checkpoint(training_args.output_dir)
    if checkpoint and main_process:
        print(f"going on from {checkpoint}")
    trainer.train(resume_from_checkpoint=checkpoint)
    if args.streaming and main_process:
        print(f"read by this process, in all epochs: {report}")
    # Whatever becomes of what follows, the training's result is there.
    trainer.save_model()
    if data["eval_dataset"] is not None:
        if args.calibrate and not args.lora_rank and (temperatures := trainer.calibrate()) and main_process:
            print(f"draft temperatures: {temperatures}")
        trainer.save_metrics("eval", trainer.evaluate())
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        # Trained in float32, used next to the target.
        drafter.to(getattr(torch, str(data["target"].config.dtype).removeprefix("torch."), torch.float32))
    trainer.save_model()
    card = {"finetuned_from": args.target_model, "dataset": args.dataset_name}
    if training_args.push_to_hub:
        trainer.push_to_hub(**card)
    else:
        trainer.create_model_card(**card)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
