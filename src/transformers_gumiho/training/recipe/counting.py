"""How many rows and tokens a run will have, before they are written."""

from typing import Any

from ..data.preparation import DataSize, prepare_dataset, size_of_prompts
from ..feature_cache import FeatureDataset, row_lengths
from .arguments import RecipeArguments
from .target import row_length


# Of the limit: how long answers are on average. Half of SmolLM2's end before 200 of 224 tokens.
_ANSWER_SHARE = 0.5
_SAMPLE = 256  # answered rows, evenly spread, that stand for all where there are more


def size_of_data(args: RecipeArguments, rows: Any, tokenizer: Any, target_config: Any) -> DataSize:
    """
    Returns the number of training rows, before packing, and of their tokens. `rows` are those of the data, `None`
    where the target writes its own questions.
    """
    if args.features is not None:
        lengths = [length for folder in args.features for length in FeatureDataset(folder).lengths]
        return DataSize(len(lengths), sum(lengths), max(lengths))
    max_length, answer = row_length(args, target_config), args.max_new_tokens * _ANSWER_SHARE
    if rows is None:
        length = min(int(args.max_prompt_tokens * _ANSWER_SHARE + answer), max_length)
        return DataSize(args.num_prompts, args.num_prompts * length, length)
    if args.regenerate:
        return size_of_prompts(rows, answer, max_length)
    sample = rows.select(range(0, len(rows), max(len(rows) // _SAMPLE, 1)))
    # A long text is cut into several rows.
    encoded, _ = prepare_dataset(sample, tokenizer, target_config, max_length=max_length, packing=False)
    lengths, scale = row_lengths(encoded) or [0], len(rows) / len(sample)
    return DataSize(round(len(lengths) * scale), round(sum(lengths) * scale), max(lengths))
