"""The committed text of a generation: rows of different lengths, and where each ends."""

from collections.abc import Sequence

import torch
from transformers import GenerationConfig
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..internals import pad_token_id
from ..uploads import upload
from .step_records import StepRecord


class CommittedSequences:
    """
    The committed tokens of all rows, which grow by different lengths until the stopping criteria end them.

    Every criterion sees every prefix, so a row ends at the same token as in plain `generate()`. Length limits and
    end-of-sequence tokens are checked on the host for all tokens of a path; other criteria run once per prefix.

    Args:
        input_ids (`(B, T)`): The prompt.
        stopping_criteria: As prepared by `generate()`.
        generation_config: As prepared by `generate()`.
        streamer: Receives the tokens of each step, `(B,)`, as soon as all rows have them.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
    ):
        batch_size, self.prompt_length = input_ids.shape
        self.max_length = max_length_of(stopping_criteria, generation_config)
        self.pad_token_id = pad_token_id(generation_config) or 0
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
        # Without an end-of-sequence token, plain generation has no padding for rows that have ended: all rows of a
        # batch continue until the last one ends.
        ends_rows = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.rows_end_alone = ends_rows or batch_size == 1
        self.streamer = streamer
        self._num_streamed = self.prompt_length

    @property
    def finished(self) -> bool:
        """Whether every row has ended. Rows that end together must also have the length of the longest one."""
        if any(end is None for end in self.ends):
            return False
        return self.rows_end_alone or min(self.lengths) >= self.final_length

    @property
    def device(self) -> torch.device:
        """Device of the tokens."""
        return self._buffer.device

    def is_open(self, row: int) -> bool:
        """Whether the row still takes tokens."""
        if self.finished or self.lengths[row] >= self.max_length:
            return False
        return self.ends[row] is None or not self.rows_end_alone

    def prefix(self, length: int) -> torch.Tensor:
        """Returns the first `length` tokens of every row, `(B, length)`. Shorter rows end in padding."""
        return self._buffer[:, :length].contiguous()

    def newest(self, accepted_lengths: Sequence[int], width: int | None = None) -> torch.Tensor:
        """
        Returns the newest `accepted_lengths[b]` tokens of each row, `(B, width)`, aligned left and padded with any
        tokens. By default the width is the largest of these lengths.
        """
        width = width or max(accepted_lengths)
        if min(self.lengths) == max(self.lengths) and min(accepted_lengths) == width:
            return self._buffer[:, self.lengths[0] - width : self.lengths[0]]
        pairs = zip(self.lengths, accepted_lengths, strict=True)
        starts = upload([length - number for length, number in pairs], self._buffer.device)
        index = starts[:, None] + torch.arange(width, device=self._buffer.device)
        return self._buffer.gather(1, index.clamp_(max=self._buffer.shape[1] - 1))

    def tokens_from(self, starts: Sequence[int]) -> list[list[int]]:
        """Returns the tokens of each row from index `starts[b]` on, on the host."""
        counts = [length - start for start, length in zip(starts, self.lengths, strict=True)]
        # As wide as the longest of these texts, wherever they are in the buffer.
        rows = self.newest(counts).tolist()
        return [row[:count] for row, count in zip(rows, counts, strict=True)]

    def final_ids(self) -> torch.Tensor:
        """Returns the finished sequences `(B, final_length)`, padded on the right."""
        return self._buffer[:, : self.final_length].clone()

    def last_tokens(self) -> torch.Tensor:
        """Returns the newest token of each row, `(B,)`."""
        return self.newest([1] * len(self.lengths)).squeeze(1)

    def num_run_by_plain(self) -> list[int]:
        """
        Returns how many new tokens of each finished row plain decoding runs: all, except for the last token of the
        longest rows.
        """
        return [min(length, self.final_length - 1) - self.prompt_length for length in self.lengths]

    @property
    def final_length(self) -> int:
        """Length of the finished sequences, padding included."""
        return max(end for end in self.ends if end is not None)

    def append(
        self, tokens: torch.Tensor, host_tokens: list[list[int]], counts: list[int], scores: StepRecord
    ) -> list[int]:
        """
        Appends tokens up to and including the one at which a row ends.

        Args:
            tokens (`(B, n)`): New tokens of each row, aligned left.
            host_tokens: The same on the host.
            counts: Number of tokens to append to each row.
            scores: The record of processed scores, up to these tokens. Criteria receive it.

        Returns:
            The accepted length of each row: the number of appended tokens.
        """
        accepted_lengths = [
            self._count_to_end(row, host_tokens[row][:count]) if self.is_open(row) else 0
            for row, count in enumerate(counts)
        ]
        self._write(tokens, accepted_lengths)
        if len(self.custom_criteria) > 0:
            accepted_lengths = self._apply_custom_criteria(accepted_lengths, scores)
        self.lengths = [length + number for length, number in zip(self.lengths, accepted_lengths, strict=True)]
        return accepted_lengths

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

    def _write(self, tokens: torch.Tensor, accepted_lengths: list[int]) -> None:
        stop = max(start + length for start, length in zip(self.lengths, accepted_lengths, strict=True))
        if stop > self._buffer.shape[1]:
            grown = self._buffer.new_full((len(accepted_lengths), 2 * stop), self.pad_token_id)
            grown[:, : self._buffer.shape[1]] = self._buffer
            self._buffer = grown
        if len(accepted_lengths) == 1:
            self._buffer[:, self.lengths[0] : stop] = tokens[:, : accepted_lengths[0]]
            return
        for row, (start, length) in enumerate(zip(self.lengths, accepted_lengths, strict=True)):
            if length:
                self._buffer[row, start : start + length] = tokens[row, :length]

    def _apply_custom_criteria(self, accepted_lengths: list[int], scores: StepRecord) -> list[int]:
        """Calls the criteria with every new prefix, the shortest first; cuts the rows that they end."""
        accepted_lengths = list(accepted_lengths)
        starts = self.lengths
        stop = max(start + number for start, number in zip(starts, accepted_lengths, strict=True))
        first = min((start for start, number in zip(starts, accepted_lengths, strict=True) if number), default=stop)
        for length in range(first + 1, stop + 1):
            rows = [row for row, start in enumerate(starts) if start < length <= start + accepted_lengths[row]]
            if not rows:
                continue
            done = self.custom_criteria(self.prefix(length), scores.until(length - self.prompt_length)).tolist()
            for row in rows:
                if done[row]:
                    self._end(row, length)
                    if self.rows_end_alone:
                        self._buffer[row, length : starts[row] + accepted_lengths[row]] = self.pad_token_id
                        accepted_lengths[row] = length - starts[row]
        return accepted_lengths

    def stream(self) -> None:
        """Passes the steps that all rows have to the streamer."""
        if self.streamer is None:
            return
        open_lengths = [length for row, length in enumerate(self.lengths) if self.is_open(row)]
        stop = min(open_lengths) if open_lengths else self.final_length
        for step in self._buffer[:, self._num_streamed : stop].cpu().unbind(dim=1):
            self.streamer.put(step)
        self._num_streamed = max(stop, self._num_streamed)


def max_length_of(stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig) -> int:
    """Returns the maximum length of a text. The caller's criterion replaces the one that `generate()` makes."""
    lengths = (criterion.max_length for criterion in stopping_criteria if type(criterion) is MaxLengthCriteria)
    return min(lengths, default=generation_config.max_length)
