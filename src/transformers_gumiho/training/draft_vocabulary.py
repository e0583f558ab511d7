"""The tokens that a drafter is trained to draft: those that the training answers hold most often."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from .feature_cache import FeatureDataset


def count_answer_tokens(
    dataset: Any,
    collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]],
    vocab_size: int,
    first: int = 0,
    step: int = 1,
) -> torch.Tensor:
    """
    Counts the tokens that states which count in the loss predict; each is one that has to be drafted.

    Args:
        dataset: A training's rows, with a length. The states of a [`FeatureDataset`] are not read.
        collate: Makes batches of rows, as the training does, and refuses broken ones.
        vocab_size: The target's.
        first: The first row to count in, ...
        step: ... and the distance to the next, for processes that share the rows.

    Returns:
        `(V,)`: How often each token occurs.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows_without_states(dataset, range(first, len(dataset), step)):
        batch = collate([row])
        # Without the padding, whose first token a row's last state does not predict.
        tokens = {name: values[0, : len(row["input_ids"])] for name, values in batch.items()}
        counts += torch.bincount(_predicted_tokens(**tokens), minlength=vocab_size)
    return counts


def choose_draft_vocabulary(
    counts: torch.Tensor, size: int, kept: Iterable[int] = (), own: Iterable[int] = ()
) -> list[int]:
    """
    Returns the `size` tokens of the highest counts `(V,)`, the most frequent first. Those in `kept` are always among
    them, and those in `own` come before all others; equally frequent ones, such as all that do not occur, go by their
    ids.

    Raises:
        ValueError: There are fewer than `size` tokens, or more than that to be kept.
    """
    always = set(kept)
    check_size(size, len(counts), len(always))
    ranking = counts.argsort(descending=True, stable=True).tolist()
    first = set(own)
    others = sorted((token for token in ranking if token not in always), key=lambda token: token not in first)
    chosen = always.union(others[: size - len(always)])
    return [token for token in ranking if token in chosen]


def check_size(size: int, vocab_size: int, num_kept: int) -> None:
    """Raises `ValueError` for a draft vocabulary of more tokens than there are, or of fewer than are always kept."""
    smallest = max(num_kept, 1)
    if not smallest <= size <= vocab_size:
        raise ValueError(
            f"`draft_vocabulary_size` must be from {smallest} (tokens that end a text are always in the vocabulary) "
            f"to the target's {vocab_size} tokens, got {size}. Choose a size in between, or `None` for all tokens."
        )


def check_countable(dataset: Any) -> None:
    """Raises `ValueError` for a dataset whose tokens cannot be counted before the training."""
    if not isinstance(dataset, Sized):
        raise ValueError(
            "A draft vocabulary is counted on the training answers before the first step, and a stream can only be "
            "read while training. Prepare the dataset without streaming, or set `draft_vocabulary_size=None`."
        )


def vocabulary_of_checkpoint(folder: str | Path) -> list[int] | None:
    """Returns the draft vocabulary that a checkpoint was trained with; `None` where it does not say."""
    if not (Path(folder) / GENERATION_CONFIG_NAME).exists():  # of an adapter, or of weights in shards
        return None
    return getattr(GenerationConfig.from_pretrained(folder), "draft_vocabulary", None)


def ending_tokens(sources: Iterable[Any], vocab_size: int) -> set[int]:
    """Returns the tokens that end a text according to any of these configs and tokenizers."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found |= set(ids if isinstance(ids, (list, tuple)) else () if ids is None else (ids,))
    return {token for token in found if 0 <= token < vocab_size}


def rows_without_states(dataset: Any, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yields these rows of a dataset with a length; the states of a [`FeatureDataset`] are not read."""
    if isinstance(dataset, Subset):
        return rows_without_states(dataset.dataset, [dataset.indices[index] for index in indices])
    if isinstance(dataset, ConcatDataset):
        places = [(bisect_right(dataset.cumulative_sizes, index), index) for index in indices]
        starts = [0, *dataset.cumulative_sizes]
        pairs = ((dataset.datasets[part], index - starts[part]) for part, index in places)
        return (row for part, index in pairs for row in rows_without_states(part, [index]))
    read = dataset.tokens_of if isinstance(dataset, FeatureDataset) else dataset.__getitem__
    return (read(index) for index in indices)


def _predicted_tokens(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, position_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the tokens after the states of a row `(L,)` that count: those of the same text, but for its first."""
    positions = torch.arange(len(input_ids)) if position_ids is None else position_ids
    same_text = positions[1:] > positions[:-1]
    return input_ids[1:][loss_mask[:-1].bool() & (positions[:-1] > 0) & same_text]
