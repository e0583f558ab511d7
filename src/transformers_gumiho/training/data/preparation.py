"""From a dataset of conversations to the rows that a drafter is trained on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, Features, Sequence, Value
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...user_errors import UserValueError
from .conversations import FORMATS, Conversation, LeftOut, MalformedRowError, RawText, parse_row, read_row
from .rendering import Renderer, counting_states, with_template_kwargs
from .sources import JSON_LINE
from .written import written_texts


_IDS, _MASK = Sequence(Value("int32")), Sequence(Value("int8"))
_ENCODED = Features(
    {"input_ids": _IDS, "loss_mask": _MASK, "problem": Value("string")}
    | dict.fromkeys(("num_cut", "num_dropped", "row"), Value("int64"))
)
_ROWS = Features({"input_ids": _IDS, "loss_mask": _MASK})
_PACKED = Features({"input_ids": _IDS, "loss_mask": _MASK, "position_ids": _IDS})
# Part of what `datasets` keeps results under: raise it whenever the same rows are to be encoded or packed differently.
_FORMAT = 3
# Texts that are packed together come from as many at a time.
_PACKING_BATCH = 1000


@dataclass
class PreparationReport(LeftOut):
    """
    What became of a dataset: `problems` counts the skipped rows by reason, and `first_rows` has the first of each.

    Attributes:
        num_texts: Texts kept; each window of a long raw text is one.
        num_truncated: Texts that were cut at the maximum length.
        num_tokens_cut: Tokens lost by that.
        num_dropped: First messages that were answers, and were left out.
        num_tokens: Tokens kept.
        num_loss_tokens: Tokens kept that the loss counts.
        num_rows: Rows after packing.
    """

    num_texts: int = 0
    num_truncated: int = 0
    num_tokens_cut: int = 0
    num_dropped: int = 0
    num_tokens: int = 0
    num_loss_tokens: int = 0
    num_rows: int = 0

    def keeps(self, row: dict[str, Any]) -> bool:
        """Counts a row of the encoded dataset; returns whether it is kept."""
        if row["problem"]:
            self.add(str(row["problem"]), int(row["row"]))
            return False
        self.num_texts += 1
        self.num_truncated += int(row["num_cut"] > 0)
        self.num_tokens_cut += int(row["num_cut"])
        self.num_dropped += int(row["num_dropped"])
        self.num_tokens += len(row["input_ids"])
        self.num_loss_tokens += int(np.sum(row["loss_mask"]))
        return True

    def __str__(self) -> str:
        lines = [
            f"{self.num_texts:,} texts with {self.num_tokens:,} tokens ({self.num_loss_tokens:,} of them count) in "
            f"{self.num_rows} rows; {self.num_truncated:,} texts truncated ({self.num_tokens_cut:,} "
            f"tokens cut); {sum(self.problems.values()):,} left out"
        ]
        if self.num_dropped:
            lines.append(f"  {self.num_dropped:,} conversations begin with an answer, which was left out")
        return "\n".join([*lines, *self.lines()])


def prepare_dataset(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    target_config: PreTrainedConfig,
    *,
    max_length: int = 2048,
    packing: bool = True,
    num_proc: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> tuple[Dataset, PreparationReport]:
    """
    Encodes conversations and texts, and packs them into rows. Where the target wrote a row, its tokens are taken as
    they are. Other conversations are rendered with the target's chat template.

    Args:
        dataset: Rows in any of the forms of [`read_row`].
        tokenizer: The target's.
        target_config: The target's.
        max_length: Longest row in tokens. A longer conversation is truncated, a longer raw text cut into windows.
        packing: Put several texts into a row, each with positions of its own, so that next to no padding is computed.
            Without it, train with `train_sampling_strategy="group_by_length"`.
        num_proc: Processes to encode with.
        chat_template_kwargs: Arguments of the chat template, such as `{"enable_thinking": False}`.

    Returns:
        Rows of `input_ids`, `loss_mask` (1 at the states that count as targets: those of assistant tokens that another
        assistant token follows) and, packed, `position_ids`; and what became of the dataset. Malformed rows, those in
        which the template hides which tokens are the assistant's, and those with tokens that the target does not have
        are skipped and counted.

    Raises:
        ValueError: `max_length` exceeds the target's positions, the dataset is empty, a stream or of no known form, or
            no row of it could be used.

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
    check_length(target_config, max_length)
    check_form(dataset)
    report = PreparationReport()
    settings = {"vocab_size": target_config.get_text_config(decoder=True).vocab_size, "max_length": max_length}
    tokenizer = with_template_kwargs(tokenizer, chat_template_kwargs)
    Renderer(tokenizer)  # refuses a tokenizer that it cannot read
    encoded = dataset.map(
        _encode_batch,
        with_indices=True,
        batched=True,
        batch_size=100,
        remove_columns=dataset.column_names,
        features=_ENCODED,
        fn_kwargs={"tokenizer": tokenizer, "format_version": _FORMAT} | settings,
        num_proc=num_proc,
        desc="encoding",
    )
    kept = [index for index, row in enumerate(encoded.with_format("numpy")) if report.keeps(row)]
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


def check_length(target_config: PreTrainedConfig, max_length: int) -> None:
    """Raises `ValueError` for more tokens than a target has positions for."""
    positions = getattr(target_config.get_text_config(decoder=True), "max_position_embeddings", None)
    if max_length < 2 or (positions and max_length > positions):
        raise UserValueError(
            f"`max_length` must be at least 2 and at most the target's {positions} positions, got {max_length}."
        )


def check_form(dataset: Dataset, answered: bool = True) -> None:
    """Raises `ValueError` for a dataset that is a stream, empty or of an unknown form."""
    if not isinstance(dataset, Dataset):
        raise UserValueError(
            f"The dataset must be a `datasets.Dataset`, got {type(dataset).__name__}. Load it at once."
        )
    columns = dataset.column_names
    if not columns or not len(dataset):
        raise UserValueError("The dataset is empty. Check its name and split.")
    known = {"messages", "conversations", "completion", "text", JSON_LINE} | (set() if answered else {"prompt"})
    if not known & set(columns):
        raise UserValueError(
            f"The dataset has the columns {columns}, and must have {FORMATS}. Rename or map its columns."
        )


def _encode_batch(
    batch: dict[str, list[Any]],
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    vocab_size: int,
    format_version: int,
) -> dict[str, list[Any]]:
    renderer = Renderer(tokenizer)
    encoded = []
    for index, values in zip(indices, zip(*batch.values(), strict=True), strict=True):
        row = dict(zip(batch, values, strict=True))
        if not str(row.get(JSON_LINE, "{}")).strip():
            continue  # a blank line is no row
        none = {"input_ids": [], "loss_mask": [], "problem": "", "num_cut": 0, "num_dropped": 0, "row": index}
        try:
            encoded += [none | new for new in _encode_row(row, renderer, max_length, vocab_size)]
        except MalformedRowError as error:
            encoded.append(none | {"problem": str(error)})
    return {name: [row[name] for row in encoded] for name in _ENCODED}


def _encode_row(row: dict[str, Any], renderer: Renderer, max_length: int, vocab_size: int) -> Iterator[dict[str, Any]]:
    texts, example = written_texts(row := parse_row(row), renderer), None
    if texts is None:
        example = read_row(row, has_template=bool(renderer.tokenizer.chat_template))
        texts = renderer.texts(example)
    if any(token >= vocab_size for ids, _ in texts for token in ids):
        raise MalformedRowError("holds tokens that the target does not have. Use the target's own tokenizer")
    num_dropped = int(isinstance(example, Conversation) and example.drops_answer)
    for ids, learned in texts:
        counts = counting_states(ids, learned, renderer.tokenizer.eos_token_id)
        windows = range(0, len(ids), max_length) if isinstance(example, RawText) and not example.prompt else range(1)
        for start in windows:
            stop = start + max_length
            mask = counts[start:stop]
            if not any(mask[1:]) and start:
                continue  # the end of a raw text, too short to learn from
            problem = "" if any(mask[1:]) else "no token to learn within the maximum length"
            cut = max(len(ids) - stop, 0) if len(windows) == 1 else 0
            yield {
                "input_ids": ids[start:stop], "loss_mask": mask, "problem": problem, "num_cut": cut,
                "num_dropped": num_dropped,
            }  # fmt: skip
            num_dropped = 0


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
