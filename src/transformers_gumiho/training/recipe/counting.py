"""How many rows and tokens a run will have, before they are written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data.conversations import read_row
from ..data.preparation import prepare_dataset
from ..feature_cache import CacheManifest, row_lengths
from ..writing.answers import WritingSettings
from .arguments import RecipeArguments
from .target import row_length


# Of the limit: how long answers are on average. Half of SmolLM2's end before 200 of 224 tokens.
_ANSWER_SHARE = 0.5
_SAMPLE = 256  # rows, evenly spread, that stand for all where there are more


def count_tokens(args: RecipeArguments, rows: Any, tokenizer: Any, target_config: Any) -> tuple[int, float]:
    """
    Returns the number of training rows, before packing, and of their tokens. `rows` are those of the data, `None`
    where the target writes its own questions.
    """
    if args.features is not None:
        lengths = [length for folder in args.features for length in CacheManifest.load(Path(folder)).lengths]
        return len(lengths), sum(lengths)
    if rows is None:
        return args.num_prompts, args.num_prompts * (args.max_prompt_tokens + args.max_new_tokens) * _ANSWER_SHARE
    sample = rows.select(range(0, len(rows), max(len(rows) // _SAMPLE, 1)))
    scale, max_length = len(rows) / len(sample), row_length(args, target_config)
    if args.regenerate:
        tokens = [min(_tokens_to_write(row, args, tokenizer), max_length) for row in sample]
        return len(rows), sum(tokens) * scale
    # A long text is cut into several rows.
    encoded, _ = prepare_dataset(sample, tokenizer, target_config, max_length=max_length, packing=False)
    lengths = row_lengths(encoded) or []
    return round(len(lengths) * scale), sum(lengths) * scale


def _tokens_to_write(row: Mapping[str, Any], args: RecipeArguments, tokenizer: Any) -> float:
    """Returns the tokens of a row whose answers are to be written: those of all turns."""
    example = read_row(row, bool(tokenizer.chat_template), answered=False)
    said = [message["content"] or "" for message in example.messages if message["role"] != "assistant"]
    num_said = sum(len(tokenizer(text)["input_ids"]) for text in said)
    if example.text == "text":  # of which only the beginning is read
        num_said = min(num_said, WritingSettings.num_prompt_tokens)
    return num_said + len(example.turns) * args.max_new_tokens * _ANSWER_SHARE
