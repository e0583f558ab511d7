"""The committed text of a generation: rows of their own lengths, where each ends, and what is kept of each step."""

from collections.abc import Sequence

import torch
from transformers import GenerationConfig
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .step_records import StepRecord


class CommittedSequences:
    """
    The committed tokens of all rows, which grow by different lengths until the stopping criteria end them.

    A row ends at exactly the token where plain `generate()` ends it, as every criterion sees every prefix. Criteria on
    length and on end-of-sequence tokens are decided on the host for a whole path at once; all others are called with
    one prefix after the other.

    Args:
        input_ids (`(B, T)`): The prompt.
        stopping_criteria: As prepared by `generate()`.
        generation_config: As prepared by `generate()`.
        streamer: Receives the tokens of all rows, `(B,)`, one step at a time, as soon as every row has them.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
    ):
        batch_size, self.prompt_length = input_ids.shape
        # A criterion of the caller's takes the place of the one that `generate()` makes from its settings.
        self.max_length: int = min(
            (criterion.max_length for criterion in stopping_criteria if type(criterion) is MaxLengthCriteria),
            default=generation_config.max_length,
        )
        pad_token = generation_config._pad_token_tensor
        self.pad_token_id = int(pad_token) if pad_token is not None else 0
        self._buffer = input_ids.new_full((batch_size, self.prompt_length + 64), self.pad_token_id)
        self._buffer[:, : self.prompt_length] = input_ids
        self.lengths = [self.prompt_length] * batch_size
        self.ends: list[int | None] = [None] * batch_size

        self.eos_token_ids: set[int] = set()
        self.custom_criteria = StoppingCriteriaList()
        for criterion in stopping_criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos_token_ids.update(criterion.eos_token_id.tolist())
            elif type(criterion) is not MaxLengthCriteria:
                self.custom_criteria.append(criterion)
        # Without an end-of-sequence token plain generation has nothing to pad an ended row with: all rows of a batch
        # go on until the last one ends.
        ends_rows = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.rows_end_alone = ends_rows or batch_size == 1
        self.streamer = streamer
        self._num_streamed = self.prompt_length

    @property
    def finished(self) -> bool:
        """Whether every row has ended, and every row has the tokens of the longest one where they end together."""
        if any(end is None for end in self.ends):
            return False
        return self.rows_end_alone or min(self.lengths) >= self.final_length

    def is_open(self, row: int) -> bool:
        """Whether the row still takes tokens."""
        if self.finished or self.lengths[row] >= self.max_length:
            return False
        return self.ends[row] is None or not self.rows_end_alone

    def prefix(self, length: int) -> torch.Tensor:
        """Returns `(B, length)`: the first tokens of every row. Rows that are shorter end in padding."""
        return self._buffer[:, :length].contiguous()

    def newest(self, counts: Sequence[int], width: int | None = None) -> torch.Tensor:
        """
        Returns `(B, width)`: the newest `counts[b]` tokens of each row, aligned left, then any tokens. By default the
        width is the largest count.
        """
        width = width or max(counts)
        if min(self.lengths) == max(self.lengths) and min(counts) == width:
            return self._buffer[:, self.lengths[0] - counts[0] : self.lengths[0]]
        starts = torch.tensor(
            [length - count for length, count in zip(self.lengths, counts, strict=True)], device=self._buffer.device
        )
        index = starts[:, None] + torch.arange(width, device=self._buffer.device)
        return self._buffer.gather(1, index.clamp_(max=self._buffer.shape[1] - 1))

    def final_ids(self) -> torch.Tensor:
        """Returns `(B, longest)`: the finished sequences, padded on the right."""
        return self._buffer[:, : self.final_length].clone()

    @property
    def final_length(self) -> int:
        """Length of the finished sequences, padding included."""
        return max(end for end in self.ends if end is not None)

    def commit(
        self, tokens: torch.Tensor, host_tokens: list[list[int]], counts: list[int], scores: StepRecord
    ) -> list[int]:
        """
        Appends tokens up to and including the one at which a row ends.

        Args:
            tokens (`(B, n)`): New tokens of each row, aligned left.
            host_tokens: The same on the host.
            counts: How many of them to append to each row.
            scores: The record of processed scores, which holds those of all `counts` tokens; criteria see it.

        Returns:
            How many were appended to each row.
        """
        kept = [
            self._count_to_end(row, host_tokens[row][:count]) if self.is_open(row) else 0
            for row, count in enumerate(counts)
        ]
        self._write(tokens, kept)
        if len(self.custom_criteria) > 0:
            kept = self._apply_custom_criteria(kept, scores)
        self.lengths = [length + number for length, number in zip(self.lengths, kept, strict=True)]
        return kept

    def _count_to_end(self, row: int, tokens: list[int]) -> int:
        """Counts the tokens up to the first one that ends the row by its length or as end of sequence."""
        for count, token in enumerate(tokens, start=1):
            length = self.lengths[row] + count
            if token in self.eos_token_ids or length >= self.max_length:
                self._end(row, length)
                if self.rows_end_alone or length >= self.max_length:
                    return count
        return len(tokens)

    def _end(self, row: int, length: int) -> None:
        end = self.ends[row]
        self.ends[row] = length if end is None else min(end, length)

    def _write(self, tokens: torch.Tensor, counts: list[int]) -> None:
        stop = max(length + count for length, count in zip(self.lengths, counts, strict=True))
        if stop > self._buffer.shape[1]:
            grown = self._buffer.new_full((len(counts), 2 * stop), self.pad_token_id)
            grown[:, : self._buffer.shape[1]] = self._buffer
            self._buffer = grown
        if len(counts) == 1:
            self._buffer[:, self.lengths[0] : stop] = tokens[:, : counts[0]]
            return
        for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            if count:
                self._buffer[row, length : length + count] = tokens[row, :count]

    def _apply_custom_criteria(self, counts: list[int], scores: StepRecord) -> list[int]:
        """Calls the criteria with every new prefix, the shortest first; cuts the rows that they end."""
        kept = list(counts)
        starts = self.lengths
        stop = max(start + count for start, count in zip(starts, counts, strict=True))
        first = min((start for start, count in zip(starts, counts, strict=True) if count), default=stop)
        for length in range(first + 1, stop + 1):
            rows = [row for row, start in enumerate(starts) if start < length <= start + kept[row]]
            if not rows:
                continue
            done = self.custom_criteria(self.prefix(length), scores.until(length - self.prompt_length)).tolist()
            for row in rows:
                if done[row]:
                    self._end(row, length)
                    if self.rows_end_alone:
                        self._buffer[row, length : starts[row] + kept[row]] = self.pad_token_id
                        kept[row] = length - starts[row]
        return kept

    def stream(self) -> None:
        """Hands the streamer the steps that every row has by now."""
        if self.streamer is None:
            return
        open_lengths = [length for row, length in enumerate(self.lengths) if self.is_open(row)]
        stop = min(open_lengths) if open_lengths else self.final_length
        for step in self._buffer[:, self._num_streamed : stop].cpu().unbind(dim=1):
            self.streamer.put(step)
        self._num_streamed = max(stop, self._num_streamed)
