"""The writing stage: the target answers questions, its own or those of a data set."""

import os
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ...commands import as_user_errors
from ...files import check_files, damaged_files_named, read_text
from .. import LocalEngine, Sampling, ServerEngine, WritingSettings, regenerate_dataset, synthesize_dataset
from ..data import open_text
from ..data.bars import write_lines
from ..data.datasets import load_conversations
from ..data.preparation import read_prompts, read_texts, usable_rows
from ..writing.row_file import Engine, processes
from .arguments import WritingArguments


def load_tokenizer(args: WritingArguments) -> PreTrainedTokenizerBase:
    """Returns the target's tokenizer, with the chat template that the options name, and its arguments."""
    return open_text.load_tokenizer(str(args.target), args.chat_template, args.chat_template_kwargs)


def load_target(args: WritingArguments) -> PreTrainedModel:
    """Returns the target, on the accelerator of this process if there is one."""
    # With its index: transformers loads in threads, in which the current device is the first one.
    with as_user_errors(), damaged_files_named(args.target):
        return AutoModelForCausalLM.from_pretrained(
            args.target, dtype=args.target_dtype, device_map=args.device_map or processes().device
        ).eval()


def generation_config(args: WritingArguments) -> GenerationConfig:
    """Returns the target's generation config, without loading the target."""
    with as_user_errors(), damaged_files_named(args.target):
        try:
            return GenerationConfig.from_pretrained(str(args.target))
        except OSError:  # the target has none, or a damaged one
            check_files(args.target, {}, "generation_config.json")
            return GenerationConfig()


def num_positions(config: PreTrainedConfig) -> int:
    """Returns the tokens that a target has positions for."""
    return int(getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize)


def row_length(args: WritingArguments, config: PreTrainedConfig) -> int:
    """Returns the most tokens of a row: the target has positions for them."""
    return min(args.max_length, num_positions(config))


def load_rows(
    args: WritingArguments,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    answered: bool,
    num_proc: int | None = None,
) -> tuple[Dataset, str]:
    """Returns the prompts of the data, or the rows that are `answered` and can be learned, and a report."""
    with processes().main_process_first():  # the others read what it has prepared
        rows = load_conversations(str(args.data), args.data_split)
        rows = rows if args.num_rows is None else rows.select(range(min(args.num_rows, len(rows))))
        max_length = row_length(args, config)
        if answered:
            found = read_texts(rows, tokenizer, config, max_length, num_proc)
        else:
            found = read_prompts(rows, tokenizer, num_proc=num_proc)
        return usable_rows(found, max_length)


def write_answers(
    args: WritingArguments,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    seed: int,
    rows: Dataset | None = None,
    target: Any = None,
    tokens_per_pass: int | None = None,
    made_from: dict[str, Any] | None = None,
) -> None:
    """
    Writes the target's answers as JSONL. Stopped, it continues when it is called again. Without `rows`, those of the
    data are read. Without `target`, it is loaded if no server runs it. It reads prompts of at most `tokens_per_pass`
    tokens at a time. `made_from` identifies the answers.
    """
    with as_user_errors(), damaged_files_named(args.target):
        config = AutoConfig.from_pretrained(args.target)
    sampling = args.sampling(generation_config(args))
    settings = WritingSettings(row_length(args, config), args.max_new_tokens, sampling, seed)
    if rows is None and not args.writes_prompts:
        rows, report = load_rows(args, tokenizer, config, answered=False)
        say(report)
    if args.endpoint is None:
        engine: Engine = LocalEngine(target or load_target(args), args.writing_batch_size, tokens_per_pass)
    else:
        model, key = str(args.endpoint_model or args.target), os.environ.get("ENDPOINT_API_KEY")
        engine = ServerEngine(args.endpoint, model, tokenizer, concurrency=args.concurrency, api_key=key)
    if args.writes_prompts:
        lines = read_text(args.openings).splitlines() if args.openings is not None else []
        rows = synthesize_dataset(
            args.num_prompts,
            engine,
            tokenizer,
            str(path).removesuffix(".jsonl") + ".prompts.jsonl",
            openings=[line.strip().replace("\\n", "\n") for line in lines if line.strip()],
            max_prompt_tokens=args.max_prompt_tokens,
            sampling=Sampling(args.temperature or 1.0, args.top_p or 0.95, args.top_k or 0),
            seed=seed,
        )
    regenerate_dataset(rows, engine, tokenizer, path, settings, made_from=made_from)


def say(text: str) -> None:
    """Prints a line in the first process."""
    if processes().is_main_process:
        write_lines(text)
