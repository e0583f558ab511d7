"""The choice of the target's tokens along a draft tree, with processors and criteria as in plain decoding."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ..tree.draft_tree import DraftTree
from ..tree.walk import AcceptedPath, ChildFinder, Walk, longest_path, pick, walk_tree
from ..verification.cycle_shapes import CycleShapes
from .sampled_walk import can_sample_at_once, draw_at_nodes, fits_memory
from .sampling_noise import NO_TOKEN
from .sequences import CommittedSequences
from .step_records import StepRecord
from .token_draws import TokenDraws


# Greedy decoding's processors that read the scores only. They are applied to all nodes of a tree at once.
_GREEDY_PROCESSORS = (InfNanRemoveLogitsProcessor, LogitNormalization, SuppressTokensLogitsProcessor)

# Processors that read the scores of each row only. Rows of different lengths need one call.
_PREFIX_FREE_PROCESSORS = (
    *_GREEDY_PROCESSORS,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

# Processors that read the scores and tokens of each row only, and keep no state between calls. The rows of a batch are
# then processed one length after the other.
_ROW_WISE_PROCESSORS = (
    *_PREFIX_FREE_PROCESSORS,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)
_ROW_WISE_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)


class TokenChooser:
    """
    Chooses the target's next tokens along a draft tree, exactly as plain decoding does, and commits them.

    Args:
        sequences: The committed text.
        logits_processor: As prepared by `generate()`.
        stopping_criteria: As prepared by `generate()`.
        generation_config: As prepared by `generate()`.
        shapes: Shapes of the cycles.
        rows_together: Whether all open rows take the same number of tokens in a cycle, which ends when one of them
            ends.
        path_width: With fixed shapes, the number of nodes of every path, root included.
    """

    def __init__(
        self,
        sequences: CommittedSequences,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        shapes: CycleShapes,
        rows_together: bool = False,
        path_width: int = 1,
    ):
        self.sequences = sequences
        self.logits_processor = logits_processor
        self.do_sample = generation_config.do_sample
        self.shapes = shapes
        self.path_width = path_width
        self.batch_size = len(sequences.lengths)
        returns_dict = generation_config.return_dict_in_generate
        self.scores = StepRecord(self.batch_size, bool(returns_dict and generation_config.output_scores))
        self.logits = StepRecord(self.batch_size, bool(returns_dict and generation_config.output_logits))
        # All rows take the same steps if a row's scores or end may depend on other rows or on earlier calls.
        self.rows_together = rows_together
        is_row_wise = all(type(processor) in _ROW_WISE_PROCESSORS for processor in logits_processor) and all(
            type(criterion) in _ROW_WISE_CRITERIA for criterion in stopping_criteria
        )
        # If all rows continue until a criterion ends the last one, faster rows would pass this end, and draw numbers
        # that plain decoding does not draw.
        goes_past_end = self.do_sample and not sequences.rows_end_alone and len(sequences.custom_criteria) > 0
        self.in_lockstep = self.batch_size > 1 and (rows_together or not is_row_wise or goes_past_end)
        self._is_prefix_free = all(type(processor) in _PREFIX_FREE_PROCESSORS for processor in logits_processor)
        self._samples_at_once = (
            self.do_sample
            and not self.in_lockstep
            and self._is_prefix_free
            and can_sample_at_once(sequences, logits_processor)
        )
        rows_diverge = self.batch_size > 1 and not self.in_lockstep
        self._draws = TokenDraws(reserves_noise=rows_diverge or self._samples_at_once)
        self._drafted_from = 0  # width of the target's logits
        self.whole_tree = (
            not self.do_sample
            and not self.in_lockstep
            and all(type(processor) in _GREEDY_PROCESSORS for processor in logits_processor)
        )

    def peek_noise(self, num_draws: int, token_ids: torch.Tensor | None = None) -> torch.Tensor | None:
        """
        Returns the Gumbel noise `(B, num_draws, K)` of each row's next draws, for the tokens `token_ids` `(K,)` or for
        all. `None` in greedy decoding, and if the noise is unknown.
        """
        if not self.do_sample:
            return None
        return self._draws.peek(num_draws, self._drafted_from, self._steps(self._open_rows()), token_ids)

    def release_noise(self) -> None:
        """Leaves the random generator as plain decoding leaves it, after the last token or an error."""
        self._draws.release()

    def choose(self, tree: DraftTree, logits: torch.Tensor) -> AcceptedPath:
        """
        Walks `tree` by the target's `logits` `(B, N + 1, V)` and commits the chosen tokens. Returns the path, which is
        `path_width` wide where shapes are fixed.
        """
        if self.whole_tree:
            path = self._commit_whole_tree(tree, logits)
        else:
            path = self._commit_sampled_tree(tree, logits) or self._commit_stepwise(tree, logits)
        # Also for a tree that is smaller than usual.
        missing = self.path_width - path.nodes.shape[1] if self.shapes.are_fixed else 0
        if missing > 0:
            nodes, tokens = (nn.functional.pad(tensor, (0, missing)) for tensor in (path.nodes, path.tokens))
            path = AcceptedPath(nodes, tokens, path.accepted_lengths)
        if self.do_sample:
            self._draws.forget(self._steps(self._open_rows()))
            self._drafted_from = logits.shape[2]
        num_generated = [length - self.sequences.prompt_length for length in self.sequences.lengths]
        self.scores.trim(num_generated)
        self.logits.trim(num_generated)
        return path

    def _commit_whole_tree(self, tree: DraftTree, logits: torch.Tensor) -> AcceptedPath:
        """Greedy, with processors that do not read the prefix: one walk on the device, one synchronization."""
        scores = self._process_nodes(tree, logits)
        # After the prefill the tree is a root alone. Compiling the walk for it does not pay.
        is_root = tree.max_depth == 0
        walk_greedily = _walk_greedily if is_root else self.shapes.stage(_walk_greedily, tree.tokens.shape[1])
        return self._commit_walk(*walk_greedily(tree, scores), logits, scores)

    def _commit_sampled_tree(self, tree: DraftTree, logits: torch.Tensor) -> AcceptedPath | None:
        """The same with a token drawn at every node. Returns `None` if tokens must be drawn one after the other."""
        if not self._samples_at_once or not fits_memory(logits):
            return None
        races = self._draws.take(longest_path(tree), logits.shape[2], self._steps(self._open_rows()))
        if races is None:
            return None
        scores = self._process_nodes(tree, logits).float()
        walk = walk_tree(tree, draw_at_nodes(tree, scores, races))
        return self._commit_walk(walk, _packed(walk), logits, scores)

    def _process_nodes(self, tree: DraftTree, logits: torch.Tensor) -> torch.Tensor:
        """Returns the processed scores `(B, N + 1, V)` of all nodes, for processors that read no tokens."""
        if len(self.logits_processor) > 0:
            flat = logits.flatten(0, 1).to(dtype=torch.float32, copy=True)
            # They get a row of input ids for each node, and do not read it.
            return self.logits_processor(tree.tokens.reshape(-1, 1).to(flat.device), flat).view_as(logits)
        # Plain decoding chooses among values rounded to float32.
        return logits.float() if logits.dtype == torch.float64 else logits

    def _commit_walk(
        self, walk: Walk, packed: torch.Tensor, logits: torch.Tensor, scores: torch.Tensor
    ) -> AcceptedPath:
        """Commits a walk up to the end of each row. `packed` holds its counts and tokens in one tensor."""
        host = packed.tolist()
        counts, tokens = [row[0] for row in host], [row[1:] for row in host]
        self._record(self.logits, logits, walk.nodes, counts)
        self._record(self.scores, scores, walk.nodes, counts)
        accepted_lengths = self.sequences.append(walk.tokens, tokens, counts, self.scores)
        if self.do_sample:
            self._draws.settle(max(self.sequences.lengths) - self.sequences.prompt_length)
            _check_drawn(row[:length] for row, length in zip(tokens, accepted_lengths, strict=True))
        return AcceptedPath(walk.nodes, walk.tokens, accepted_lengths)

    def _commit_stepwise(self, tree: DraftTree, logits: torch.Tensor) -> AcceptedPath:
        """
        Chooses one token after the other, as plain decoding: processors get the true prefix of each node once, and
        criteria and the streamer run after each token.
        """
        node = tree.parents[:, :1]
        children = ChildFinder(tree)
        node_logits = logits.flatten(0, 1)
        first_nodes = torch.arange(0, len(node_logits), logits.shape[1], device=node.device)
        visited: list[torch.Tensor] = []
        chosen: list[torch.Tensor] = []
        accepted_lengths = [0] * self.batch_size
        walking = self._open_rows()
        while any(walking):
            visited.append(node)
            index = (node.squeeze(1) + first_nodes).to(logits.device)
            step_logits = node_logits.index_select(0, index).to(dtype=torch.float32, device=node.device)
            scores = self._process(step_logits, walking)
            if self.do_sample:
                tokens = self._draws.draw(scores, self._steps(walking))
            else:
                tokens = scores.argmax(dim=-1, keepdim=True)
            chosen.append(tokens)
            node, found = children.find(node, tokens)
            host = torch.cat((tokens, found), dim=1).tolist()
            _check_drawn(row[:1] for row in host)
            counts = [int(is_walking) for is_walking in walking]
            self.logits.add(step_logits[:, None], counts)
            self.scores.add(scores[:, None], counts)
            new = self.sequences.append(tokens, [row[:1] for row in host], counts, self.scores)
            # Before the next draw, as in plain decoding, because a streamer may draw random numbers, too.
            self.sequences.stream()
            accepted_lengths = [total + number for total, number in zip(accepted_lengths, new, strict=True)]
            still_open = self._open_rows()
            found_child = [bool(row[1]) for row in host]
            if self.in_lockstep and not all(
                found for found, is_open in zip(found_child, still_open, strict=True) if is_open
            ):
                break
            if self.rows_together and any(
                was and not is_open for was, is_open in zip(walking, still_open, strict=True)
            ):
                break
            lengths = self.sequences.lengths
            slowest = min((length for length, is_open in zip(lengths, still_open, strict=True) if is_open), default=0)
            walking = [
                is_walking and found and is_open and length - slowest < self._draws.most_ahead
                for is_walking, found, is_open, length in zip(walking, found_child, still_open, lengths, strict=True)
            ]
        return AcceptedPath(torch.cat(visited, dim=1), torch.cat(chosen, dim=1), accepted_lengths)

    def _open_rows(self) -> list[bool]:
        return [self.sequences.is_open(row) for row in range(self.batch_size)]

    def _steps(self, takes_token: Sequence[bool]) -> list[int | None]:
        """Returns the number of generated tokens of each row, `None` for rows that take no token."""
        generated = [length - self.sequences.prompt_length for length in self.sequences.lengths]
        return [step if takes else None for step, takes in zip(generated, takes_token, strict=True)]

    def _process(self, logits: torch.Tensor, walking: list[bool]) -> torch.Tensor:
        """
        Returns the processed scores `(B, V)` of each walking row's next token.

        Processors take rows of one length. So there is one call for each length, and its results for the other rows
        are not used. Processors that do not read the prefix need one call only.
        """
        lengths = self.sequences.lengths
        processed: torch.Tensor | None = None
        walking_lengths = sorted({length for length, is_walking in zip(lengths, walking, strict=True) if is_walking})
        if self._is_prefix_free:
            del walking_lengths[1:]
        # A processor may change its input in place.
        is_read_again = self.logits.enabled or len(walking_lengths) > 1
        for length in walking_lengths:
            scores = self.logits_processor(self.sequences.prefix(length), logits.clone() if is_read_again else logits)
            if processed is None:
                processed = scores
                continue
            rows = [row for row, row_length in enumerate(lengths) if row_length == length]
            processed[rows] = scores[rows]
        if processed is None:
            raise RuntimeError("No row takes another token.")
        return processed

    def _record(self, record: StepRecord, values: torch.Tensor, nodes: torch.Tensor, counts: list[int]) -> None:
        if record.enabled:
            picked = pick(values, nodes[:, : max(counts)])
            record.add(picked.to(dtype=torch.float32, device=nodes.device), counts)


def _walk_greedily(tree: DraftTree, scores: torch.Tensor) -> tuple[Walk, torch.Tensor]:
    """Returns the walk by the best scores, and its counts and tokens in one tensor `(B, 1 + L)` for the host."""
    walk = walk_tree(tree, scores.argmax(dim=-1).to(tree.tokens.device))
    return walk, _packed(walk)


def _packed(walk: Walk) -> torch.Tensor:
    return torch.cat((walk.counts[:, None], walk.tokens), dim=1)


def _check_drawn(tokens_of_rows: Iterable[list[int]]) -> None:
    """Raises the error of `torch.multinomial` if a token was drawn without positive probabilities."""
    if any(NO_TOKEN in tokens for tokens in tokens_of_rows):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
