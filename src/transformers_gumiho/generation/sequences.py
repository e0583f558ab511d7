"""The committed text of a generation: rows of different lengths, where each ends, and the records of its tokens."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..internals import pad_token_id
from .tree.draft_tree import DraftTree
from .tree.walk import Path, pick


class CommittedSequences:
    """
    The committed tokens of all rows, which grow by different lengths until the stopping criteria end them.

    Every criterion sees every prefix, so a row ends at the same token as in plain `generate()`. Length limits and
    end-of-sequence tokens are checked on the host for all tokens of a path; other criteria run once per prefix. A
    streamer receives the tokens of each step, `(B,)`, as soon as all rows have them.

    Attributes:
        new_tokens: The new tokens of each row, on the host.
        lengths: Number of tokens of each row, those of the prompt included.
        open_rows: For each row, whether it still takes tokens.
        finished: Whether every row has ended. Rows that end together also have the length of the longest one.
        records: What is returned of each token beside the text.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
    ):
        batch_size, self.prompt_length = input_ids.shape
        self.max_length = max_length_of(stopping_criteria, generation_config, self.prompt_length)
        self.pad_token_id = pad_token_id(generation_config) or 0
        size = batch_size, self.prompt_length + 64
        self._buffer = input_ids.new_full(size, self.pad_token_id, dtype=torch.long)
        self._buffer[:, : self.prompt_length] = input_ids
        self.new_tokens: list[list[int]] = [[] for _ in range(batch_size)]
        self.lengths = [self.prompt_length] * batch_size
        self.ends: list[int | None] = [None] * batch_size
        self.records = GenerationRecords(batch_size, generation_config)

        self.eos_token_ids: set[int] = set()
        self._num_positions: int | None = None  # of the target, until a text beyond them is warned of
        self.custom_criteria = StoppingCriteriaList()
        for criterion in stopping_criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos_token_ids.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                self._num_positions = criterion.max_position_embeddings
            else:
                self.custom_criteria.append(criterion)
        # Without an end-of-sequence token, plain generation has no padding for rows that have ended: all rows of a
        # batch continue until the last one ends.
        ends_rows = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.pads_finished_rows = ends_rows or batch_size == 1
        self.streamer = streamer
        self._num_streamed = self.prompt_length
        self.finished, self.open_rows = False, [True] * batch_size

    @property
    def num_missing(self) -> int:
        """Most tokens that an open row still takes."""
        open_lengths = itertools.compress(self.lengths, self.open_rows)
        return self.max_length - min(open_lengths, default=self.max_length)

    @property
    def final_length(self) -> int:
        """Length of the finished sequences, padding included."""
        return max(end for end in self.ends if end is not None)

    @property
    def device(self) -> torch.device:
        """Device of the tokens."""
        return self._buffer.device

    def prefix(self, length: int) -> torch.Tensor:
        """Returns the first `length` tokens of every row, `(B, length)`. Shorter rows end in padding."""
        return self._buffer[:, :length].contiguous()

    def tokens_from(self, starts: Sequence[int]) -> list[list[int]]:
        """Returns the tokens of each row from index `starts[b]` on, on the host. Only the prompt is read for it."""
        length = self.prompt_length
        prompt = self._buffer[:, :length].tolist() if min(starts) < length else [[] for _ in starts]
        rows = zip(prompt, self.new_tokens, starts, strict=True)
        return [row[start:] + new[max(start - length, 0) :] for row, new, start in rows]

    def final_ids(self) -> torch.Tensor:
        """Returns the finished sequences `(B, final_length)`, padded on the right."""
        return self._buffer[:, : self.final_length].clone()

    def num_cached_by_plain_decoding(self) -> list[int]:
        """Returns how many new tokens of each finished row plain decoding runs: all but the last of the longest."""
        return [min(length, self.final_length - 1) - self.prompt_length for length in self.lengths]

    def commit(self, path: Path) -> Path:
        """
        Commits a path, or one step of it: in each open row the tokens up to and including the one that ends the row.
        They are recorded, and the streamer gets the steps that all rows have. Returns what is committed.
        """
        # 1. Each row ends at an end-of-sequence token or the length limit, which are known on the host.
        lengths = [0] * len(self.lengths)
        for row, tokens in enumerate(path.host_tokens):
            if self.open_rows[row]:
                lengths[row] = self._count_to_end(row, tokens)
        self._write(path.tokens, lengths)
        self.records.add_tokens(path, lengths)
        # 2. Other criteria may end it earlier. They see the scores of the tokens before.
        if len(self.custom_criteria) > 0:
            lengths = self._apply_custom_criteria(lengths)
            ends = [start + number for start, number in zip(self.lengths, lengths, strict=True)]
            for record in (self.records.logits, self.records.scores):
                record.trim([end - self.prompt_length for end in ends])
        # 3. The rows grow.
        committed = path.cut(lengths)
        self.lengths = [start + length for start, length in zip(self.lengths, lengths, strict=True)]
        for tokens, new in zip(self.new_tokens, committed.host_tokens, strict=True):
            tokens.extend(new)
        self._note_ends()
        self._warn_of_length()
        self._stream()
        return committed

    def _note_ends(self) -> None:
        """Notes which rows still take tokens."""
        if None not in self.ends:
            self.finished = self.pads_finished_rows or min(self.lengths) >= self.final_length
        self.open_rows = [
            not self.finished and length < self.max_length and (end is None or not self.pads_finished_rows)
            for length, end in zip(self.lengths, self.ends, strict=True)
        ]

    def _count_to_end(self, row: int, tokens: Sequence[int]) -> int:
        """Counts the tokens up to the first one that ends the row by its length or as end of sequence."""
        for count, token in enumerate(tokens, start=1):
            length = self.lengths[row] + count
            if token in self.eos_token_ids or length >= self.max_length:
                # Without padding, the row only has an end that others wait for, and goes on.
                self._end(row, length)
                if self.pads_finished_rows or length >= self.max_length:
                    return count
        return len(tokens)

    def _end(self, row: int, length: int) -> None:
        self.ends[row] = min(length, self.ends[row] or length)

    def _write(self, tokens: torch.Tensor, accepted_lengths: list[int]) -> None:
        room, longest = self._buffer.shape[1], max(self.lengths) + max(accepted_lengths)
        if longest > room:
            self._buffer = torch.nn.functional.pad(self._buffer, (0, 2 * longest - room), value=self.pad_token_id)
        for row, (start, number) in enumerate(zip(self.lengths, accepted_lengths, strict=True)):
            if number:
                self._buffer[row, start : start + number] = tokens[row, :number]

    def _apply_custom_criteria(self, accepted_lengths: list[int]) -> list[int]:
        """Calls the criteria with every new prefix, the shortest first; cuts the rows that they end."""
        starts, accepted_lengths = self.lengths, list(accepted_lengths)
        # 1. The lengths that any row has on its way, each asked for once, as plain decoding does.
        for length in range(min(starts) + 1, max(starts) + max(accepted_lengths) + 1):
            rows = [row for row, start in enumerate(starts) if start < length <= start + accepted_lengths[row]]
            if not rows:
                continue
            scores = self.records.scores.until(length - self.prompt_length)
            done = self.custom_criteria(self.prefix(length), scores).tolist()
            # 2. A row that a criterion ends here has no later token.
            for row in rows:
                if done[row]:
                    self._end(row, length)
                    if self.pads_finished_rows:
                        self._buffer[row, length : starts[row] + accepted_lengths[row]] = self.pad_token_id
                        accepted_lengths[row] = length - starts[row]
        return accepted_lengths

    def _warn_of_length(self) -> None:
        """Makes transformers' criterion warn, as in plain decoding, of a text beyond the target's positions."""
        longest = min(max(self.lengths), self.max_length - 1)  # the criterion cannot end the text there
        if self._num_positions is not None and longest > self._num_positions:
            MaxLengthCriteria(self.max_length, self._num_positions)(self.prefix(longest), None)
            self._num_positions = None

    def _stream(self) -> None:
        if self.streamer is None:
            return
        open_lengths = [*itertools.compress(self.lengths, self.open_rows)]
        stop = min(open_lengths) if open_lengths else self.final_length
        for step in self._buffer[:, self._num_streamed : stop].cpu().unbind(dim=1):
            self.streamer.put(step)
        self._num_streamed = max(stop, self._num_streamed)


def max_length_of(
    stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, prompt_length: int
) -> int:
    """Returns the maximum length of a text. The caller's criterion replaces the one that `generate()` makes."""
    lengths = [own.max_length for own in stopping_criteria if type(own) is MaxLengthCriteria]
    shortest = min(lengths, default=generation_config.max_length)
    # Criteria are asked after a token, so there is always one. A length that is no integer is reached by the next one.
    return max(math.ceil(shortest), prompt_length + 1)


class StepRecord:
    """Values of every generated token, row by row; without `enabled` nothing is recorded, and it reads as `None`."""

    def __init__(self, batch_size: int, enabled: bool):
        self.enabled = enabled
        self._rows: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]
        self._complete: list[torch.Tensor] = []  # the steps that every row has, stacked

    def add(self, values: torch.Tensor | None, counts: Sequence[int]) -> None:
        """Records the first `counts[b]` of `values` `(B, n, ...)` for each row."""
        if self.enabled and values is not None:
            for row, (steps, count) in enumerate(zip(self._rows, counts, strict=True)):
                steps.extend(values[row, :count].unbind())

    def trim(self, lengths: Sequence[int]) -> None:
        """Keeps the first `lengths[b]` values of each row."""
        if self.enabled:
            for steps, length in zip(self._rows, lengths, strict=True):
                del steps[length:]
            del self._complete[min(lengths) :]

    def until(self, num_steps: int) -> tuple[torch.Tensor, ...] | None:
        """Returns a tensor `(B, ...)` for each of the first steps, with zeros in rows that have ended."""
        if not self.enabled:
            return None
        if num_steps == 0:
            return ()
        num_complete = min(num_steps, *map(len, self._rows))
        for step in range(len(self._complete), num_complete):
            self._complete.append(torch.stack([steps[step] for steps in self._rows]))
        found = self._complete[:num_steps]
        zeros = torch.zeros_like(next(steps[0] for steps in self._rows if steps))
        for step in range(len(found), num_steps):
            of_rows = [steps[step] if step < len(steps) else zeros for steps in self._rows]
            found.append(torch.stack(of_rows))
        return tuple(found)


class GenerationRecords:
    """What `generate()` returns beside the text: values of every token, and what each cycle verified and committed."""

    def __init__(self, batch_size: int, generation_config: GenerationConfig):
        config = generation_config
        returns_dict = bool(config.return_dict_in_generate)
        self.scores = StepRecord(batch_size, returns_dict and bool(config.output_scores))
        self.logits = StepRecord(batch_size, returns_dict and bool(config.output_logits))
        self._has_states = returns_dict and bool(config.output_hidden_states)
        self._prompt_states: tuple[torch.Tensor, ...] | None = None
        self._layers: list[StepRecord] = []  # the hidden states of the later tokens
        self.draft_origins: list[Any] = []
        self.tree_sizes: list[int] = []
        self._accepted_lengths: list[list[int]] = [[] for _ in range(batch_size)]

    def add_tokens(self, path: Path, lengths: Sequence[int]) -> None:
        """Records the scores and logits of the first `lengths[b]` tokens of each row."""
        self.logits.add(path.logits, lengths)
        self.scores.add(path.scores, lengths)

    def add_prompt(self, hidden_states: Any) -> None:
        """Records the states of the prompt, which belong to the first token."""
        if self._has_states:
            self._prompt_states = tuple(hidden_states)
            self._layers = [StepRecord(len(self._accepted_lengths), True) for _ in self._prompt_states]

    def add_cycle(self, tree: DraftTree, origin: str, path: Path, hidden_states: Any) -> None:
        """Records a cycle, with the states `(B, N + 1, H)` of each layer."""
        if self._has_states:
            for record, states in zip(self._layers, hidden_states, strict=True):
                record.add(pick(states, path.nodes), path.accepted_lengths)
        self.draft_origins.append(origin)
        self.tree_sizes.append(tree.tokens.shape[1] - 1)
        for row, length in zip(self._accepted_lengths, path.accepted_lengths, strict=True):
            row.extend([length] if length else [])

    def hidden_states(self, num_steps: int) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        """Returns for each of the first steps the states of all layers, `(B, 1, H)` after the first step."""
        if self._prompt_states is None:
            return None
        layers = [record.until(num_steps - 1) or () for record in self._layers]
        later = (tuple(layer[step][:, None] for layer in layers) for step in range(num_steps - 1))
        return self._prompt_states, *later

    def accepted_lengths(self, num_removed: Sequence[int]) -> list[list[int]]:
        """Returns the tokens that the cycles committed in each row, without the last `num_removed[b]` tokens."""
        kept = [list(row) for row in self._accepted_lengths]
        for row, surplus in zip(kept, num_removed, strict=True):
            while surplus and surplus >= row[-1]:
                surplus -= row.pop()
            if surplus:
                row[-1] -= surplus
        return kept
