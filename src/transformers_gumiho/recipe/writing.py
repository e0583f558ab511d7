"""The writing stage: the target answers questions, its own or those of a data set."""

import os
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..text_files import read_text
from ..training import (
    Endpoint,
    load_conversations,
    regenerate_dataset,
    synthesize_dataset,
    synthesize_from_endpoint,
)
from ..user_errors import UserValueError, as_user_errors
from .arguments import WritingArguments


def load_tokenizer(args: WritingArguments) -> PreTrainedTokenizerBase:
    """Returns the target's tokenizer, with the chat template that the options name."""
    with as_user_errors():
        tokenizer = AutoTokenizer.from_pretrained(args.target)
    if args.chat_template is not None:
        tokenizer.chat_template = read_text(args.chat_template)
    return tokenizer


def load_target(args: WritingArguments) -> PreTrainedModel:
    """Returns the target, on the machine's accelerator if there is one."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    with as_user_errors():
        return AutoModelForCausalLM.from_pretrained(
            args.target, dtype=args.target_dtype, device_map=args.device_map or device
        ).eval()


def load_rows(args: WritingArguments) -> Dataset:
    """Returns the rows of the data."""
    rows = load_conversations(str(args.data), args.data_split)
    return rows if args.num_rows is None else rows.select(range(min(args.num_rows, len(rows))))


def write_answers(
    args: WritingArguments,
    target: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    seed: int,
    max_length: int = 2048,
) -> None:
    """
    Writes the target's answers as JSONL, in conversations of at most `max_length` tokens. Stopped, it continues when
    it is called again. With an endpoint, `target` is `None`.
    """
    settings, rows = args.synthesis(seed), None if args.writes_prompts else load_rows(args)
    lines = read_text(args.openings).splitlines() if args.openings is not None else []
    openings = [line.strip().replace("\\n", "\n") for line in lines if line.strip()]
    if args.endpoint is not None:
        model, key = str(args.endpoint_model or args.target), os.environ.get("ENDPOINT_API_KEY")
        endpoint = Endpoint(args.endpoint, model, concurrency=args.concurrency, api_key=key)
        synthesize_from_endpoint(endpoint, tokenizer, path, settings, questions=rows, openings=openings)
    elif target is None:
        raise UserValueError("Writing needs the target, or the `endpoint` of a server that runs it.")
    elif rows is None:
        synthesize_dataset(target, tokenizer, path, settings, openings=openings)
    else:
        positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        regenerate_dataset(
            rows,
            target,
            tokenizer,
            path,
            batch_size=settings.batch_size,
            max_length=min(max_length, positions or max_length),
            max_new_tokens=settings.max_new_tokens,
            seed=seed,
            sampling=settings.sampling,
        )
