"""From a dataset of conversations to the rows that a drafter is trained on."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset, Features, Sequence, Value
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..user_errors import UserValueError
from .conversations import FORMATS, JSON_LINE, MalformedRowError, RawText, read_row
from .rendering import check_tokenizer, counting_states, encode


_IDS, _MASK = Sequence(Value("int32")), Sequence(Value("int8"))
_NUMBER = Value("int64")
_ENCODED = Features(
    {"input_ids": _IDS, "loss_mask": _MASK, "problem": Value("string"), "num_cut": _NUMBER, "row": _NUMBER}
)
_ROWS = Features({"input_ids": _IDS, "loss_mask": _MASK})
_PACKED = Features({"input_ids": _IDS, "loss_mask": _MASK, "position_ids": _IDS})
# Part of what `datasets` keeps results under: raise it whenever the same rows are to be encoded or packed differently.
_FORMAT = 2
# Texts that are packed together come from as many at a time.
_PACKING_BATCH = 1000


@dataclass
class PreparationReport:
    """
    What became of a dataset.

    Attributes:
        num_texts: Texts kept; each window of a long raw text is one.
        problems: Number of skipped rows, by reason.
        first_rows: Index of the first row skipped for each of these reasons.
        num_truncated: Texts that were cut at the maximum length.
        num_tokens_cut: Tokens lost by that.
        num_tokens: Tokens kept.
        num_loss_tokens: Tokens kept that the loss counts.
        num_rows: Rows after packing.
    """

    num_texts: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    first_rows: dict[str, int] = field(default_factory=dict)
    num_truncated: int = 0
    num_tokens_cut: int = 0
    num_tokens: int = 0
    num_loss_tokens: int = 0
    num_rows: int = 0

    def add(self, row: dict[str, Any]) -> bool:
        """Counts a row of the encoded dataset; returns whether it is kept."""
        if row["problem"]:
            self.problems[str(row["problem"])] += 1
            self.first_rows.setdefault(str(row["problem"]), int(row["row"]))
            return False
        self.num_texts += 1
        self.num_truncated += int(row["num_cut"] > 0)
        self.num_tokens_cut += int(row["num_cut"])
        self.num_tokens += len(row["input_ids"])
        self.num_loss_tokens += int(np.sum(row["loss_mask"]))
        return True

    def __str__(self) -> str:
        lines = [
            f"{self.num_texts:,} texts with {self.num_tokens:,} tokens ({self.num_loss_tokens:,} of them count) in "
            f"{self.num_rows} rows; {self.num_truncated:,} texts truncated ({self.num_tokens_cut:,} "
            f"tokens cut); {sum(self.problems.values()):,} skipped"
        ]
        for reason, count in self.problems.most_common():
            lines.append(f"  skipped {count:,} (the first is row {self.first_rows[reason]}): {reason}")
        return "\n".join(lines)


def prepare_dataset(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    target_config: PreTrainedConfig,
    *,
    max_length: int = 2048,
    packing: bool = True,
    num_proc: int | None = None,
) -> tuple[Dataset, PreparationReport]:
    """
    Renders conversations with the target's chat template, encodes them, and packs them into rows.

    Args:
        dataset: Rows in any of the forms of [`read_row`].
        tokenizer: The target's.
        target_config: The target's.
        max_length: Longest row in tokens. A longer conversation is truncated, a longer raw text cut into windows.
        packing: Put several texts into a row, each with positions of its own, so that next to no padding is computed.
            Without it, train with `train_sampling_strategy="group_by_length"`.
        num_proc: Processes to encode with.

    Returns:
        Rows of `input_ids`, `loss_mask` (1 at the states that count as targets: those of assistant tokens that another
        assistant token follows) and, packed, `position_ids`; and what became of the dataset. Malformed rows, and those
        in which the template hides which tokens are the assistant's, are skipped and counted.

    Raises:
        ValueError: The tokenizer does not belong to the target, `max_length` exceeds the target's positions, the
            dataset is empty, a stream or of no known form, or no row of it could be used.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from transformers import AutoConfig, AutoTokenizer
    >>> from transformers_gumiho.training import prepare_dataset

    >>> tokenizer = AutoTokenizer.from_pretrained("examples/demo_pair/target")
    >>> config = AutoConfig.from_pretrained("examples/demo_pair/target")
    >>> texts = Dataset.from_dict({"text": ["import os", "import json"]})
    >>> rows, report = prepare_dataset(texts, tokenizer, config, max_length=32)
    >>> len(rows), rows.column_names  # both texts are packed into one row
    (1, ['input_ids', 'loss_mask', 'position_ids'])

    ```
    """
    check_settings(tokenizer, target_config, max_length)
    _check_form(dataset)
    report = PreparationReport()
    encoded = dataset.map(
        _encode_batch,
        with_indices=True,
        batched=True,
        batch_size=100,
        remove_columns=dataset.column_names,
        features=_ENCODED,
        fn_kwargs={"tokenizer": tokenizer, "max_length": max_length, "format_version": _FORMAT},
        num_proc=num_proc,
        desc="encoding",
    )
    kept = [index for index, row in enumerate(encoded.with_format("numpy")) if report.add(row)]
    if not kept:
        raise UserValueError(f"No row of the dataset could be used:\n{report}")
    rows = encoded.select(kept).select_columns(list(_ROWS))
    if packing:
        rows = rows.map(
            _pack_batch,
            batched=True,
            batch_size=_PACKING_BATCH,
            remove_columns=list(_ROWS),
            features=_PACKED,
            fn_kwargs={"max_length": max_length, "format_version": _FORMAT},
            desc="packing",
        )
    report.num_rows = len(rows)
    return rows, report


def check_settings(tokenizer: PreTrainedTokenizerBase, target_config: PreTrainedConfig, max_length: int) -> None:
    """Raises `ValueError` for a tokenizer that is not the target's, or for more tokens than it has positions for."""
    check_tokenizer(tokenizer)
    config = target_config.get_text_config(decoder=True)
    if len(tokenizer) > config.vocab_size:
        raise UserValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has {len(tokenizer)} tokens, and the target "
            f"{config.vocab_size}. Give the tokenizer that belongs to the target."
        )
    positions = getattr(config, "max_position_embeddings", None)
    if max_length < 2 or (positions and max_length > positions):
        raise UserValueError(
            f"`max_length` must be at least 2 and at most the target's {positions} positions, got {max_length}."
        )


def _check_form(dataset: Dataset) -> None:
    """Raises `ValueError` for a dataset that is a stream, empty or of an unknown form."""
    if not isinstance(dataset, Dataset):
        raise UserValueError(
            f"The dataset must be a `datasets.Dataset`, got {type(dataset).__name__}. Load it at once."
        )
    columns = dataset.column_names
    if not columns or not len(dataset):
        raise UserValueError("The dataset is empty. Check its name and split.")
    if not {"messages", "conversations", "completion", "text", JSON_LINE} & set(columns):
        raise UserValueError(
            f"The dataset has the columns {columns}, and must have {FORMATS}. Rename or map its columns."
        )


def _encode_batch(
    batch: dict[str, list[Any]],
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    format_version: int,
) -> dict[str, list[Any]]:
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    numbered = zip(indices, rows, strict=True)
    encoded = [new | {"row": index} for index, row in numbered for new in _encode_row(row, tokenizer, max_length)]
    return {name: [row[name] for row in encoded] for name in _ENCODED}


def _encode_row(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Iterator[dict[str, Any]]:
    if not str(row.get(JSON_LINE, "{}")).strip():
        return  # a blank line is no row
    try:
        example = read_row(row, has_template=bool(tokenizer.chat_template))
        texts = encode(tokenizer, example)
    except MalformedRowError as error:
        yield {"input_ids": [], "loss_mask": [], "problem": str(error), "num_cut": 0}
        return
    for ids, assistant in texts:
        counts = counting_states(ids, assistant, tokenizer.eos_token_id)
        windows = range(0, len(ids), max_length) if isinstance(example, RawText) and not example.prompt else range(1)
        for start in windows:
            stop = start + max_length
            mask = counts[start:stop]
            if not any(mask[1:]) and start:
                continue  # the end of a raw text, too short to learn from
            problem = "" if any(mask[1:]) else "no token to learn within the maximum length"
            cut = max(len(ids) - stop, 0) if len(windows) == 1 else 0
            yield {"input_ids": ids[start:stop], "loss_mask": mask, "problem": problem, "num_cut": cut}


def _pack_batch(batch: dict[str, list[list[int]]], max_length: int, format_version: int) -> dict[str, list[list[int]]]:
    """Packs texts first-fit, the longest first, which leaves few gaps."""
    lengths = [len(ids) for ids in batch["input_ids"]]
    rows: list[list[int]] = []
    space: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = next((row for row, left in enumerate(space) if left >= lengths[index]), None)
        if fitting is None:
            rows.append([])
            space.append(max_length)
            fitting = len(rows) - 1
        rows[fitting].append(index)
        space[fitting] -= lengths[index]

    def joined(name: str) -> list[list[int]]:
        return [[value for index in row for value in batch[name][index]] for row in rows]

    positions = [[position for index in row for position in range(lengths[index])] for row in rows]
    return {"input_ids": joined("input_ids"), "loss_mask": joined("loss_mask"), "position_ids": positions}
