"""Batches of rows for a drafter's training."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..commands import UserValueError


_STATES = ("hidden_states", "layer_states")
# Columns in which other libraries number the texts of a packed row.
TEXT_NUMBERS = ("seq_idx", "document_ids", "attention_mask")
# How other libraries mark the assistant's tokens, with the value of all others.
OTHER_MARKS = {"labels": -100, "assistant_masks": 0, "completion_mask": 0}


@dataclass
class GumihoDataCollator:
    """
    Pads rows on the right into a batch.

    A row holds `input_ids` (`L` token ids), and optionally `loss_mask` (1 at the states that count as targets;
    default: those between tokens that `labels`, `assistant_masks` or `completion_mask` mark as the assistant's, or
    else all), `position_ids` (the position of each token in its own text, if the row packs several; other libraries'
    `seq_lengths`, or numbers of the texts in `attention_mask`, `seq_idx` or `document_ids` say it, too),
    `hidden_states` (`(L, H)`, cached features of the target) and `layer_states` (`(L, k * H)`, of further layers).
    Attention is causal, so padding needs no attention mask. Its positions start at zero, as those of another text.

    Args:
        vocab_size: Where given, token ids from there on are refused.
        max_length: Where given, longer rows are refused.
    """

    vocab_size: int | None = None
    max_length: int | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Returns `input_ids` and `loss_mask` `(B, L)`, and the other columns where the rows have them."""
        for row in rows:
            _check_columns(row)
        ids = self._pad([torch.as_tensor(row["input_ids"], dtype=torch.long, device="cpu") for row in rows])
        self._check(ids)
        # Rows from several sources: packed ones next to others, for which tables hold no value.
        own_positions = [positions_of(row) for row in rows]
        positions = [
            torch.as_tensor(range(len(row["input_ids"])) if own is None else own, device="cpu").long()
            for row, own in zip(rows, own_positions, strict=True)
        ]
        masks = [loss_mask_of(row, of_row) for row, of_row in zip(rows, positions, strict=True)]
        batch = {"input_ids": ids, "loss_mask": self._pad(masks)}
        if any(own is not None for own in own_positions):
            padding = [torch.arange(ids.shape[1] - len(of_row), device="cpu") for of_row in positions]
            batch["position_ids"] = torch.stack([torch.cat(pair) for pair in zip(positions, padding, strict=True)])
        for name in _STATES:
            if rows[0].get(name) is not None:
                batch[name] = self._pad([torch.as_tensor(row[name], device="cpu") for row in rows])
        return batch

    def _pad(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        padded = pad_sequence(tensors, batch_first=True)
        # At least two: the drafter reads pairs of a token and the one after it.
        missing = max(2 - padded.shape[1], 0)
        return torch.cat((padded, padded.new_zeros(len(padded), missing, *padded.shape[2:])), dim=1)

    def _check(self, ids: torch.Tensor) -> None:
        outside = ids[(ids < 0) | (ids >= (self.vocab_size or float("inf")))]
        if len(outside):
            raise UserValueError(
                f"A row holds the token {int(outside[0])}, but target and drafter know {self.vocab_size or 'no such'} "
                f"tokens. Prepare the dataset with the target's own tokenizer."
            )
        if self.max_length is not None and ids.shape[1] > self.max_length:
            raise UserValueError(
                f"A row has {ids.shape[1]} tokens, but target and drafter have positions for {self.max_length}. "
                f"Prepare the dataset with `max_length={self.max_length}` or less."
            )


def positions_of(row: Mapping[str, Any]) -> Any:
    """
    Returns the position of each token in its own text, as a row or other libraries' marks of packed texts say; `None`
    where the row is one text.

    Raises:
        ValueError: The lengths of the texts are not those of the row.
    """
    if row.get("position_ids") is not None:
        return row["position_ids"]
    length = len(row["input_ids"])
    if (lengths := row.get("seq_lengths")) is not None:
        lengths = torch.as_tensor(lengths).tolist()
        if sum(lengths) != length:
            raise UserValueError(f"A row has {length} tokens, but its `seq_lengths` are {lengths}.")
    else:
        name = next((name for name in TEXT_NUMBERS if row.get(name) is not None), None)
        numbers = [1] if name is None else torch.as_tensor(row[name]).tolist()
        lengths = [len(list(run)) for _, run in groupby(numbers)]
    return [place for of_text in lengths for place in range(of_text)] if len(lengths) > 1 else None


def collate_all(collate: GumihoDataCollator, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collates rows as if all their tokens were the assistant's."""
    unmarked = ({name: value for name, value in row.items() if name != "loss_mask"} for row in rows)
    return collate([row | {"labels": row.get("input_ids")} for row in unmarked])


def _check_columns(row: Mapping[str, Any]) -> None:
    if "input_ids" not in row:
        raise UserValueError(
            f"A row must hold `input_ids`, and one of the batch holds only {sorted(row)}. Prepare conversations with "
            f"`transformers_gumiho.training.prepare_dataset`."
        )
    length = len(row["input_ids"])
    if not length:
        raise UserValueError("A row holds no tokens. Leave such rows out of the dataset.")
    if row.get("attention_mask") is not None and 0 in row["attention_mask"]:
        raise UserValueError(
            "A row is padded: its `attention_mask` holds 0. Tokenize without padding, as rows are padded in batches."
        )
    for name in ("loss_mask", *OTHER_MARKS, "position_ids", *TEXT_NUMBERS, *_STATES):
        if row.get(name) is not None and len(row[name]) != length:
            raise UserValueError(f"A row has {length} tokens, but its `{name}` is for {len(row[name])}.")


def loss_mask_of(row: Mapping[str, Any], position_ids: torch.Tensor | None = None) -> torch.Tensor:
    """
    Returns `(L,)`: 1 at each state of a row that counts, as its `loss_mask` says or other marks of it imply.

    Raises:
        ValueError: The `loss_mask` holds other values than 0 and 1.
    """
    marks = next((name for name in ("loss_mask", *OTHER_MARKS) if row.get(name) is not None), None)
    if marks is None:
        return torch.ones(len(row["input_ids"]), dtype=torch.long, device="cpu")
    values = torch.as_tensor(row[marks], device="cpu")
    if marks == "loss_mask":
        if len(others := values[(values != 0) & (values != 1)]):
            raise UserValueError(
                f"The `loss_mask` of a row holds {others[0].item():g}. Give 1 for states that count, 0 for all others."
            )
        return values.long()
    positions = torch.arange(len(values), device="cpu") if position_ids is None else position_ids
    is_assistants = values != OTHER_MARKS[marks]
    return _counts_all(positions) * (is_assistants & is_assistants.roll(-1))


def _counts_all(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns `(L,)`: 1 at each state of texts at these positions that another token of the same text follows."""
    mask = torch.zeros_like(position_ids)
    mask[:-1] = position_ids[1:] > position_ids[:-1]
    return mask
