"""The choice of the target's tokens along a draft tree, with processors and criteria as in plain decoding."""

from collections.abc import Iterator, Sequence
from enum import Enum, auto

import torch
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
from ..tree.walk import ChildFinder, Walk, longest_path, pick, walk_tree
from ..verification.cycle_shapes import CycleShapes
from .sequences import CommittedSequences, WalkedTokens
from .token_draws import NO_TOKEN, TokenDraws, sample_by_exponentials


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

# Where sampled tokens are drawn at all nodes of a tree at once, so that the host waits for the path and not for each
# of its tokens. On a CPU there is no wait to save, and each node costs time: 4 ms for one with top-p, 62 ms for 63.
_AT_ONCE_DEVICES = ("cuda", "xpu")
_MAX_BYTES = 256 << 20  # of the float32 scores of all nodes; processors make several tensors of their size


class RowPolicy(Enum):
    """Which rows of a batch take tokens together."""

    INDEPENDENT = auto()  # each row takes as many tokens as its drafts allow
    TOGETHER = auto()  # all open rows take the same steps
    TOGETHER_TO_FIRST_END = auto()  # and the steps of a cycle end when a row does


class TokenChooser:
    """
    Chooses the target's next tokens along a draft tree, exactly as plain decoding does.

    Args:
        sequences: The committed text.
        logits_processor: As prepared by `generate()`, with the warpers of sampling.
        stopping_criteria: As prepared by `generate()`.
        generation_config: As prepared by `generate()`.
        shapes: The shapes of the walk.
        rows_advance_together: Whether the target's cache needs all rows to take the same steps (chains).
    """

    def __init__(
        self,
        sequences: CommittedSequences,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        shapes: CycleShapes,
        rows_advance_together: bool = False,
    ):
        self.sequences = sequences
        self.logits_processor = logits_processor
        self.do_sample = generation_config.do_sample
        self.shapes = shapes
        self.rows = _row_policy(sequences, logits_processor, stopping_criteria, self.do_sample, rows_advance_together)
        kinds = {type(processor) for processor in logits_processor}
        self._reads_prefix = not kinds <= {*_PREFIX_FREE_PROCESSORS}
        if self.do_sample:
            # A token may be drawn before its parent is committed if nothing runs between two draws. `EtaLogitsWarper`
            # raises an error for NaN, also at nodes that the walk does not visit.
            runs_between = sequences.streamer is not None or len(sequences.custom_criteria) > 0
            is_possible = not (self._reads_prefix or runs_between or EtaLogitsWarper in kinds)
            walks_at_once = is_possible and sequences.device.type in _AT_ONCE_DEVICES
        else:
            walks_at_once = kinds <= {*_GREEDY_PROCESSORS}
        self._walks_at_once = walks_at_once and self.rows is RowPolicy.INDEPENDENT
        batch_size = len(sequences.lengths)
        reserve = self._walks_at_once or (batch_size > 1 and self.rows is RowPolicy.INDEPENDENT)
        self._draws = TokenDraws(batch_size, reserve) if self.do_sample else None
        self._vocab_size = 0  # width of the target's logits

    def peek_noise(self, num_draws: int, token_ids: torch.Tensor | None = None) -> torch.Tensor | None:
        """
        Returns the Gumbel noise `(B, num_draws, K)` of each row's next draws, for the tokens `token_ids` `(K,)` or for
        all. `None` in greedy decoding, and if the noise is unknown.
        """
        if self._draws is None:
            return None
        return self._draws.peek(num_draws, self._vocab_size, self._steps(self.sequences.open_rows), token_ids)

    def return_unused_draws(self) -> None:
        """Leaves the random generator as plain decoding leaves it, after the last token or an error."""
        if self._draws is not None:
            self._draws.return_unused()

    def walk(self, tree: DraftTree, logits: torch.Tensor) -> Iterator[WalkedTokens]:
        """
        Walks `tree` by the target's `logits` `(B, N + 1, V)`. Yields the tokens: all of them at once, or one step
        after the other. Each part must be committed before the next one is chosen.
        """
        draws, exponentials = self._draws, None
        if draws is not None and self._walks_at_once and 4 * logits.numel() <= _MAX_BYTES:
            steps = self._steps(self.sequences.open_rows)
            exponentials = draws.take(longest_path(tree), logits.shape[2], steps)
        if draws is None and self._walks_at_once:
            yield self._walk_greedily(tree, logits)
        elif draws is not None and exponentials is not None:
            yield from self._walk_sampled(tree, logits, draws, exponentials)
        else:
            yield from self._walk_stepwise(tree, logits)
        if draws is not None:
            draws.forget(self._steps(self.sequences.open_rows))
            self._vocab_size = logits.shape[2]

    def _walk_greedily(self, tree: DraftTree, logits: torch.Tensor) -> WalkedTokens:
        """Walks by the best tokens, with processors that do not read the prefix: one walk on the device."""
        scores = self._process_nodes(tree, logits)
        # After the prefill the tree is a root alone. Compiling the walk for it does not pay.
        is_root = tree.max_depth == 0
        walk = (_walk_greedily if is_root else self.shapes.stage(_walk_greedily, tree.tokens.shape[1]))(tree, scores)
        return self._walked(walk, logits, scores)

    def _walk_sampled(
        self, tree: DraftTree, logits: torch.Tensor, draws: TokenDraws, exponentials: torch.Tensor
    ) -> Iterator[WalkedTokens]:
        """The same by tokens that are drawn at all nodes, with the variates `(B, L, V)` of the draws at each depth."""
        scores = self._process_nodes(tree, logits).float()
        walked = self._walked(walk_tree(tree, draw_at_nodes(tree, scores, exponentials)), logits, scores)
        before = self.sequences.lengths
        yield walked
        draws.advance_generator(max(self.sequences.lengths) - self.sequences.prompt_length)
        # What is not committed need not come from a distribution.
        for tokens, first, last in zip(walked.host_tokens, before, self.sequences.lengths, strict=True):
            _check_drawn(tokens[: last - first])

    def _process_nodes(self, tree: DraftTree, logits: torch.Tensor) -> torch.Tensor:
        """Returns the processed scores `(B, N + 1, V)` of all nodes, for processors that read no tokens."""
        if len(self.logits_processor) > 0:
            flat = logits.flatten(0, 1).to(dtype=torch.float32, copy=True)
            # They get a row of input ids for each node, and do not read it.
            return self.logits_processor(tree.tokens.reshape(-1, 1).to(flat.device), flat).view_as(logits)
        # Plain decoding chooses among values rounded to float32.
        return logits.float() if logits.dtype == torch.float64 else logits

    def _walked(self, walk: Walk, logits: torch.Tensor, scores: torch.Tensor) -> WalkedTokens:
        """Brings a walk to the host: the one time in a cycle that the host waits."""
        host = walk.packed.tolist()
        counts, tokens = [row[0] for row in host], [row[1:] for row in host]

        def along(values: torch.Tensor, is_recorded: bool) -> torch.Tensor | None:
            if not is_recorded:
                return None
            picked = pick(values, walk.nodes[:, : max(counts)])
            return picked.to(dtype=torch.float32, device=walk.nodes.device)

        records = self.sequences.records
        return WalkedTokens(
            walk.nodes,
            walk.tokens,
            tokens,
            counts,
            along(logits, records.logits.enabled),
            along(scores, records.scores.enabled),
        )

    def _walk_stepwise(self, tree: DraftTree, logits: torch.Tensor) -> Iterator[WalkedTokens]:
        """
        Chooses one token after the other, as plain decoding: processors get the true prefix of each node once, and
        criteria and the streamer run after each token.
        """
        sequences = self.sequences
        node = tree.parents[:, :1]
        children = ChildFinder(tree)
        node_logits = logits.flatten(0, 1)
        first_nodes = torch.arange(0, len(node_logits), logits.shape[1], device=node.device)
        walking = sequences.open_rows
        while any(walking):
            # 1. The target's next token after the node that each row has reached.
            index = (node.squeeze(1) + first_nodes).to(logits.device)
            step_logits = node_logits.index_select(0, index).to(dtype=torch.float32, device=node.device)
            scores = self._process(step_logits, walking)
            if self._draws is not None:
                tokens = self._draws.draw(scores, self._steps(walking))
            else:
                tokens = scores.argmax(dim=-1, keepdim=True)
            # 2. The child that carries it: the draft is accepted. Without one, it is the bonus token.
            child, found = children.find(node, tokens)
            host = torch.cat((tokens, found), dim=1).tolist()
            host_tokens, has_child = [row[:1] for row in host], [bool(row[1]) for row in host]
            for row in host_tokens:
                _check_drawn(row)
            # 3. It is committed before the next one is chosen, because criteria and streamers may draw numbers, too.
            counts = [int(is_walking) for is_walking in walking]
            yield WalkedTokens(node, tokens, host_tokens, counts, step_logits[:, None], scores[:, None])
            # 4. Rows walk on where they found a child.
            walking = self._walks_on(walking, has_child)
            node = child

    def _walks_on(self, walking: list[bool], has_child: list[bool]) -> list[bool]:
        """Returns which of the rows that were `walking` take another token in this cycle."""
        is_open, lengths = self.sequences.open_rows, self.sequences.lengths
        open_rows = [row for row, row_is_open in enumerate(is_open) if row_is_open]
        if self.rows is not RowPolicy.INDEPENDENT and not all(has_child[row] for row in open_rows):
            return [False] * len(walking)
        if self.rows is RowPolicy.TOGETHER_TO_FIRST_END and is_open != walking:
            return [False] * len(walking)
        slowest = min((lengths[row] for row in open_rows), default=0)
        max_lead = float("inf") if self._draws is None else self._draws.max_lead
        return [
            walking[row] and has_child[row] and is_open[row] and lengths[row] - slowest < max_lead
            for row in range(len(walking))
        ]

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
        if not self._reads_prefix:
            del walking_lengths[1:]
        # A processor may change its input in place.
        is_read_again = self.sequences.records.logits.enabled or len(walking_lengths) > 1
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


def _row_policy(
    sequences: CommittedSequences,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    do_sample: bool,
    rows_advance_together: bool,
) -> RowPolicy:
    """Returns which rows go together. The arguments are those of [`TokenChooser`]."""
    if len(sequences.lengths) == 1:
        return RowPolicy.INDEPENDENT
    if rows_advance_together:
        return RowPolicy.TOGETHER_TO_FIRST_END
    # A row's scores or end may depend on other rows or on earlier calls.
    is_row_wise = all(type(processor) in _ROW_WISE_PROCESSORS for processor in logits_processor) and all(
        type(criterion) in _ROW_WISE_CRITERIA for criterion in stopping_criteria
    )
    # If all rows continue until a criterion ends the last one, faster rows would pass this end, and draw numbers that
    # plain decoding does not draw.
    passes_end = do_sample and not sequences.pads_finished_rows and len(sequences.custom_criteria) > 0
    return RowPolicy.INDEPENDENT if is_row_wise and not passes_end else RowPolicy.TOGETHER


def _walk_greedily(tree: DraftTree, scores: torch.Tensor) -> Walk:
    return walk_tree(tree, scores.argmax(dim=-1).to(tree.tokens.device))


def draw_at_nodes(tree: DraftTree, scores: torch.Tensor, exponentials: torch.Tensor) -> torch.Tensor:
    """
    Returns the token `(B, N + 1)` that is drawn after each node; `NO_TOKEN` if its scores are no distribution.

    Args:
        tree: The draft tree.
        scores (`(B, N + 1, V)`): Processed logits, float32.
        exponentials (`(B, L, V)`): Exponential variates of the draws at each depth.
    """
    batch_size, num_depths, _ = exponentials.shape
    first_draws = torch.arange(0, batch_size * num_depths, num_depths, device=tree.depths.device)
    index = (tree.depths + first_draws[:, None]).flatten().to(scores.device)
    of_nodes = exponentials.to(scores.device).flatten(0, 1).index_select(0, index).view_as(scores)
    return sample_by_exponentials(scores.softmax(dim=-1), of_nodes).squeeze(-1).to(tree.tokens.device)


def _check_drawn(tokens: list[int]) -> None:
    """Raises the error of `torch.multinomial` if a token was drawn without positive probabilities."""
    if NO_TOKEN in tokens:
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
