"""The choice of the target's tokens along a draft tree, with processors and criteria as in plain decoding."""

from collections.abc import Sequence, Set
from dataclasses import replace
from itertools import compress

import torch
from transformers import generation
from transformers.generation import LogitsProcessorList

from .sequences import CommittedSequences
from .token_draws import NO_TOKEN, TokenDraws, sample_by_exponentials
from .tree.draft_tree import DraftTree
from .tree.walk import Path, find_children, longest_path, pick, walk_tree
from .verification.cycle_shapes import CycleShapes


# Greedy decoding's processors that read the scores only. They are applied to all nodes of a tree at once.
_GREEDY_PROCESSORS: Set[type] = {
    generation.InfNanRemoveLogitsProcessor,
    generation.LogitNormalization,
    generation.SuppressTokensLogitsProcessor,
}
# Processors that read the scores of each row only. Rows of different lengths need one call.
_PREFIX_FREE_PROCESSORS: Set[type] = _GREEDY_PROCESSORS | {
    generation.EpsilonLogitsWarper,
    generation.EtaLogitsWarper,
    generation.MinPLogitsWarper,
    generation.TemperatureLogitsWarper,
    generation.TopKLogitsWarper,
    generation.TopPLogitsWarper,
    generation.TypicalLogitsWarper,
}
# Processors that read the scores and tokens of each row only, and keep no state between calls. The rows of a batch are
# then processed one length after the other.
_ROW_WISE_PROCESSORS: Set[type] = _PREFIX_FREE_PROCESSORS | {
    generation.ExponentialDecayLengthPenalty,
    generation.ForcedBOSTokenLogitsProcessor,
    generation.ForcedEOSTokenLogitsProcessor,
    generation.MinLengthLogitsProcessor,
    generation.MinNewTokensLengthLogitsProcessor,
    generation.NoBadWordsLogitsProcessor,
    generation.NoRepeatNGramLogitsProcessor,
    generation.RepetitionPenaltyLogitsProcessor,
    generation.SequenceBiasLogitsProcessor,
    generation.SuppressTokensAtBeginLogitsProcessor,
}
# Beside those of lengths and end-of-sequence tokens.
_ROW_WISE_CRITERIA: Set[type] = {generation.MaxTimeCriteria, generation.StopStringCriteria}

# Where sampled tokens are drawn at all nodes of a tree at once, so that the host waits for the path and not for each
# of its tokens. On a CPU there is no wait to save, and each node costs time.
_AT_ONCE_DEVICES = ("cuda", "xpu")
_MAX_BYTES = 256 << 20  # of the float32 scores of all nodes; processors make several tensors of their size


class TokenChooser:
    """
    Chooses the target's next tokens along a draft tree, exactly as plain decoding does.

    Args:
        sequences: The committed text.
        logits_processor: As prepared by `generate()`, with the warpers of sampling.
        do_sample: Whether tokens are drawn.
        shapes: The shapes of the walk.
        rows_advance_together: Whether the target's cache needs all rows to take the same steps (chains). The steps of
            a cycle then end when a row does.
    """

    def __init__(
        self,
        sequences: CommittedSequences,
        logits_processor: LogitsProcessorList,
        do_sample: bool,
        shapes: CycleShapes,
        rows_advance_together: bool = False,
    ):
        self.sequences = sequences
        self.logits_processor = logits_processor
        self.shapes = shapes
        kinds = {type(processor) for processor in logits_processor}
        # Else each row takes as many tokens as its drafts allow.
        self._are_rows_together = len(sequences.lengths) > 1 and (
            rows_advance_together or _depend_on_each_other(sequences, kinds, do_sample)
        )
        self._reads_prefix = not kinds <= _PREFIX_FREE_PROCESSORS
        walks_at_once = kinds <= _GREEDY_PROCESSORS
        if do_sample:
            # A token may be drawn before its parent is committed if nothing runs between two draws. `EtaLogitsWarper`
            # raises an error for NaN, also at nodes that the walk does not visit.
            runs_between = sequences.streamer is not None or len(sequences.custom_criteria) > 0
            is_possible = not (self._reads_prefix or runs_between or generation.EtaLogitsWarper in kinds)
            walks_at_once = is_possible and sequences.device.type in _AT_ONCE_DEVICES
        self._walks_at_once = walks_at_once and not self._are_rows_together
        batch_size = len(sequences.lengths)
        reserve = self._walks_at_once or (batch_size > 1 and not self._are_rows_together)
        self._draws = TokenDraws(batch_size, reserve) if do_sample else None
        self._vocab_size = 0  # width of the target's logits

    def peek_noise(self, num_draws: int, token_ids: torch.Tensor | None = None) -> torch.Tensor | None:
        """
        Returns the Gumbel noise `(B, num_draws, K)` of each row's next draws, for the tokens `token_ids` `(K,)` or for
        all. `None` in greedy decoding, and if the noise is unknown.
        """
        if self._draws is None:
            return None
        steps = self._steps(self.sequences.open_rows)
        return self._draws.peek(num_draws, self._vocab_size, steps, token_ids)

    def return_unused_draws(self) -> None:
        """Leaves the random generator as plain decoding leaves it, after the last token or an error."""
        if self._draws is not None:
            self._draws.return_unused()

    def commit_path(self, tree: DraftTree, logits: torch.Tensor) -> Path:
        """
        Walks `tree` by the target's `logits` `(B, N + 1, V)` and commits the tokens: all of them at once, or one step
        after the other. Returns the committed path.
        """
        draws = self._draws
        if draws is None:
            if not self._walks_at_once:
                return self._commit_steps(tree, logits)
            return self.sequences.commit(self._walk_greedily(tree, logits))
        exponentials = None
        if self._walks_at_once and 4 * logits.numel() <= _MAX_BYTES:
            steps = self._steps(self.sequences.open_rows)
            exponentials = draws.take(longest_path(tree), logits.shape[2], steps)
        if exponentials is None:
            path = self._commit_steps(tree, logits)
        else:
            path = self._commit_drawn(tree, logits, draws, exponentials)
        draws.forget(self._steps(self.sequences.open_rows))
        self._vocab_size = logits.shape[2]
        return path

    def _walk_greedily(self, tree: DraftTree, logits: torch.Tensor) -> Path:
        """Walks by the best tokens: one walk on the device."""
        scores, walk = self._process_nodes(tree, logits), walk_to_best
        # After the prefill the tree is a root alone. Compiling the walk for it does not pay.
        if tree.max_depth > 0:
            walk = self.shapes.compiled(walk_to_best, tree.tokens.shape[1])
        return self._fetch_path(*walk(tree, scores), logits, scores)

    def _commit_drawn(
        self, tree: DraftTree, logits: torch.Tensor, draws: TokenDraws, exponentials: torch.Tensor
    ) -> Path:
        """The same by tokens that are drawn at all nodes, with the variates `(B, L, V)` of the draws at each depth."""
        scores = self._process_nodes(tree, logits).float()
        drawn = draw_at_nodes(tree, scores, exponentials)
        path = self._fetch_path(*walk_tree(tree, drawn), logits, scores)
        path = self.sequences.commit(path)
        draws.advance_generator(max(self.sequences.lengths) - self.sequences.prompt_length)
        # What is not committed need not come from a distribution.
        for tokens in path.host_tokens:
            _check_drawn(tokens)
        return path

    def _process_nodes(self, tree: DraftTree, logits: torch.Tensor) -> torch.Tensor:
        """Returns the processed scores `(B, N + 1, V)` of all nodes, for processors that read no tokens."""
        if len(self.logits_processor) > 0:
            flat = logits.flatten(0, 1).to(dtype=torch.float32, copy=True)
            # They get a row of input ids for each node, and do not read it.
            input_ids = tree.tokens.reshape(-1, 1).to(flat.device)
            return self.logits_processor(input_ids, flat).view_as(logits)
        # Plain decoding chooses among values rounded to float32.
        return logits.float() if logits.dtype == torch.float64 else logits

    def _fetch_path(
        self, nodes: torch.Tensor, packed: torch.Tensor, logits: torch.Tensor, scores: torch.Tensor
    ) -> Path:
        """Brings what [`walk_tree`] returns to the host: the one time in a cycle that the host waits."""
        host_tokens = [tokens[:count] for count, *tokens in packed.tolist()]
        path, records = Path(nodes, packed[:, 1:], host_tokens), self.sequences.records
        if records.logits.enabled:
            path = replace(path, logits=pick(logits, nodes).to(nodes.device, torch.float32))
        if records.scores.enabled:
            path = replace(path, scores=pick(scores, nodes).to(nodes.device, torch.float32))
        return path

    def _commit_steps(self, tree: DraftTree, logits: torch.Tensor) -> Path:
        """
        Chooses and commits one token after the other, as plain decoding: processors get the true prefix of each node
        once, and criteria and the streamer run after each token.
        """
        sequences, steps = self.sequences, list[Path]()
        node = tree.parents[:, :1]
        node_logits = logits.flatten(0, 1)
        first_nodes = torch.arange(0, len(node_logits), logits.shape[1], device=node.device)
        walking = sequences.open_rows
        # Below the tree's depth nothing counts.
        while any(walking) and len(steps) < longest_path(tree):
            # 1. The target's next token after the node that each row has reached.
            index = (node.squeeze(1) + first_nodes).to(logits.device)
            step_logits = node_logits.index_select(0, index).to(dtype=torch.float32, device=node.device)
            scores = self._process(step_logits, walking)
            if self._draws is not None:
                tokens = self._draws.draw(scores, self._steps(walking))
            else:
                tokens = scores.argmax(dim=-1, keepdim=True)
            # 2. The child that carries it: the draft is accepted. Without one, it is the bonus token.
            child, found = find_children(tree, node, tokens)
            host = torch.cat((tokens, found), dim=1).tolist()
            host_tokens = [[token] if takes else [] for (token, _), takes in zip(host, walking, strict=True)]
            for row in host_tokens:
                _check_drawn(row)
            # 3. It is committed before the next one is chosen, because criteria and streamers may draw numbers, too.
            step = Path(node, tokens, host_tokens, step_logits[:, None], scores[:, None])
            steps.append(sequences.commit(step))
            # 4. Rows walk on where they found a child.
            walking = self._walks_on(walking, [bool(is_found) for _, is_found in host])
            node = child
        return Path.join(steps)

    def _walks_on(self, walking: list[bool], has_child: list[bool]) -> list[bool]:
        """Returns which of the rows that were `walking` take another token in this cycle."""
        is_open, lengths = self.sequences.open_rows, self.sequences.lengths
        open_rows = [row for row, row_is_open in enumerate(is_open) if row_is_open]
        if self._are_rows_together:
            all_walk = is_open == walking and all(has_child[row] for row in open_rows)
            if not all_walk:
                return [False] * len(walking)
        # A sampled row may be so far ahead of the slowest one that its draws are not kept.
        slowest = min((lengths[row] for row in open_rows), default=0)
        max_lead = float("inf") if self._draws is None else self._draws.max_lead
        in_reach = [length - slowest < max_lead for length in lengths]
        return [all(of_row) for of_row in zip(walking, has_child, is_open, in_reach, strict=True)]

    def _steps(self, takes_token: Sequence[bool]) -> list[int | None]:
        """Returns the number of generated tokens of each row, `None` for rows that take no token."""
        generated = [length - self.sequences.prompt_length for length in self.sequences.lengths]
        return [step if takes else None for step, takes in zip(generated, takes_token, strict=True)]

    def _process(self, logits: torch.Tensor, walking: list[bool]) -> torch.Tensor:
        """
        Returns the processed scores `(B, V)` of each walking row's next token. Processors that read the prefix take
        rows of one length: there is one call for each length, whose results for the other rows are not used.
        """
        lengths, process = self.sequences.lengths, self.logits_processor
        walking_lengths = sorted(set(compress(lengths, walking)))
        if len(walking_lengths) == 1 or not self._reads_prefix:
            # A processor may change its input in place.
            scores = logits.clone() if self.sequences.records.logits.enabled else logits
            return process(self.sequences.prefix(walking_lengths[0]), scores)
        processed = torch.zeros_like(logits)
        for length in walking_lengths:
            rows = [row for row, row_length in enumerate(lengths) if row_length == length]
            processed[rows] = process(self.sequences.prefix(length), logits.clone())[rows]
        return processed


def _depend_on_each_other(sequences: CommittedSequences, processors: Set[type], do_sample: bool) -> bool:
    """Whether a row's scores or end may depend on other rows or on earlier calls."""
    criteria = {type(criterion) for criterion in sequences.custom_criteria}
    if not (processors <= _ROW_WISE_PROCESSORS and criteria <= _ROW_WISE_CRITERIA):
        return True
    # If all rows continue until a criterion ends the last one, faster rows would pass this end, and draw numbers that
    # plain decoding does not draw.
    return do_sample and not sequences.pads_finished_rows and len(sequences.custom_criteria) > 0


def walk_to_best(tree: DraftTree, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Walks the tree by the tokens of the best `scores` `(B, N + 1, V)`; see [`walk_tree`]."""
    return walk_tree(tree, scores.argmax(dim=-1).to(tree.tokens.device))


def draw_at_nodes(tree: DraftTree, scores: torch.Tensor, exponentials: torch.Tensor) -> torch.Tensor:
    """
    Returns the token `(B, N + 1)` that is drawn after each node by its processed scores `(B, N + 1, V)`, float32, and
    the exponential variates `(B, L, V)` at each depth; `NO_TOKEN` if the scores are no distribution.
    """
    batch_size, num_depths, _ = exponentials.shape
    first_draws = torch.arange(0, batch_size * num_depths, num_depths, device=tree.depths.device)
    index = (tree.depths + first_draws[:, None]).flatten().to(scores.device)
    of_nodes = exponentials.to(scores.device).flatten(0, 1).index_select(0, index)
    drawn = sample_by_exponentials(scores.softmax(dim=-1), of_nodes.view_as(scores))
    return drawn.squeeze(-1).to(tree.tokens.device)


def _check_drawn(tokens: Sequence[int]) -> None:
    """Raises the error of `torch.multinomial` if a token was drawn without positive probabilities."""
    if NO_TOKEN in tokens:
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
