"""Batches of rows for a drafter's training."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence


_STATES = ("hidden_states", "layer_states")


@dataclass
class GumihoDataCollator:
    """
    Pads rows on the right into a batch.

    A row holds `input_ids` (`L` token ids), and where it is given, `loss_mask` (1 at the states that count as targets;
    default: all), `position_ids` (the position of each token in its own text, where several are packed into the row),
    `hidden_states` (`(L, H)`, cached features of the target) and `layer_states` (`(L, k * H)`, those of further
    layers). Attention is causal, so padding on the right needs no attention mask; its positions start at zero, so that
    a packed batch takes it for a text of its own.

    Args:
        vocab_size: Where given, token ids from there on are refused.
        max_length: Where given, longer rows are refused.
        pad_to_multiple_of: Round the length of a batch up to a multiple of this.
        assistant_only_loss: Whether a row's `loss_mask` tells what counts; otherwise all of its states do, but for the
            last one of each text, after which nothing is drafted. [`GumihoTrainer`] sets it, for training alone.
    """

    vocab_size: int | None = None
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    assistant_only_loss: bool = True

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Returns `input_ids` and `loss_mask` `(B, L)`, and the other columns where the rows have them."""
        if missing := [row for row in rows if "input_ids" not in row]:
            raise ValueError(
                f"A row must hold `input_ids`, and one of the batch holds only {sorted(missing[0])}. Prepare "
                f"conversations with `transformers_gumiho.training.prepare_dataset`."
            )
        batch = {"input_ids": self._pad([torch.as_tensor(row["input_ids"], dtype=torch.long) for row in rows])}
        self._check(batch["input_ids"])
        for row in rows:
            for name in ("loss_mask", "position_ids", *_STATES):
                if name in row and len(row[name]) != len(row["input_ids"]):
                    raise ValueError(
                        f"A row has {len(row['input_ids'])} tokens, but its `{name}` is for {len(row[name])}."
                    )
        # Rows from several sources: packed ones next to others.
        positions = [torch.as_tensor(row.get("position_ids", range(len(row["input_ids"])))).long() for row in rows]
        masks = [torch.as_tensor(row.get("loss_mask", [1] * len(row["input_ids"]))).long() for row in rows]
        if not self.assistant_only_loss:
            masks = [_counts_all(of_row) for of_row in positions]
        batch["loss_mask"] = self._pad(masks)
        if any("position_ids" in row for row in rows):
            length = batch["input_ids"].shape[1]
            batch["position_ids"] = torch.stack([torch.cat((p, torch.arange(length - len(p)))) for p in positions])
        for name in _STATES:
            if name in rows[0]:
                batch[name] = self._pad([torch.as_tensor(row[name]) for row in rows])
        return batch

    def _pad(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        padded = pad_sequence(tensors, batch_first=True)
        excess = padded.shape[1] % self.pad_to_multiple_of if self.pad_to_multiple_of else 0
        if not excess:
            return padded
        shape = list(padded.shape)
        shape[1] = self.pad_to_multiple_of - excess  # type: ignore[operator]
        return torch.cat((padded, padded.new_zeros(shape)), dim=1)

    def _check(self, input_ids: torch.Tensor) -> None:
        if self.vocab_size is not None and int(input_ids.max()) >= self.vocab_size:
            raise ValueError(
                f"A row holds the token {int(input_ids.max())}, but target and drafter know {self.vocab_size} tokens. "
                f"Prepare the dataset with the target's own tokenizer."
            )
        if self.max_length is not None and input_ids.shape[1] > self.max_length:
            raise ValueError(
                f"A row has {input_ids.shape[1]} tokens, but target and drafter have positions for {self.max_length}. "
                f"Prepare the dataset with `max_length={self.max_length}` or less."
            )


def _counts_all(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns `(L,)`: 1 at each state of texts at these positions that another token of the same text follows."""
    mask = torch.zeros_like(position_ids)
    mask[:-1] = position_ids[1:] > position_ids[:-1]
    return mask
