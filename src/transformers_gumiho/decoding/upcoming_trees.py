"""The draft trees of a generation: what the drafter reads, when it drafts, and what the context adds."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import compress

from ..drafting.break_even import estimate_break_even
from ..drafting.candidate_generator import GumihoCandidateGenerator
from ..drafting.committed_tokens import CommittedTokens
from ..drafting.context_branch import ContextBranch
from ..drafting.context_drafts import ContextDrafts
from ..drafting.pause import DraftingPause, DraftOrigin
from ..drafting.settings import DraftingSettings
from ..model.modeling_gumiho import GumihoModel
from ..target.feature_reader import TargetStates
from ..target.output_head import head_for_drafting
from ..target.session import TargetOutput, TargetSession
from ..target.tree_cache import TreeCache
from ..tree.draft_tree import DraftTree, bare_root, padded_root
from ..tree.verification import AcceptedPath, pick
from .observers import GenerationEvents
from .sequences import CommittedSequences
from .token_choice import TokenChooser


# Committed tokens after which a run ends, so that the drafter reads them: all at once, which takes memory. A pause may
# add those of its cycles.
_MAX_UNREAD_TOKENS = 256


class UpcomingTrees:
    """
    The draft trees of a generation, one for each cycle: the drafter's, and what the context drafts. The drafter pauses
    while it gains less than it costs ([`DraftingPause`]); what was committed meanwhile is kept until it drafts again.
    A text that repeats its context is drafted by that alone, in longer and longer runs.

    Args:
        session: Of the target, which has read the prompt.
        drafter: The drafter.
        settings: Its settings for the batch.
        chooser: Of the target's tokens.
        output: What the target computed for the prompt.
        events: Receives the stages of drafting and the origin of each tree.
    """

    def __init__(
        self,
        session: TargetSession,
        drafter: GumihoModel,
        settings: DraftingSettings,
        chooser: TokenChooser,
        output: TargetOutput,
        events: GenerationEvents,
    ):
        self._session = session
        self._drafter = drafter
        self._sequences = chooser.sequences
        self._events = events
        self._settings = settings
        self._generator = _make_generator(session, drafter, settings, chooser, output.states, events)
        self._context_drafts = _context_drafts(session, settings, chooser.sequences)
        break_even = settings.break_even
        if break_even is None:
            break_even = estimate_break_even(session.model, drafter, settings, chooser.batch_size)
        self._pause = DraftingPause(break_even)
        self._num_nodes = 0  # of the drafter's trees, root not included
        self._is_drafted = False  # whether the newest tree is the drafter's
        self._unread: list[CommittedTokens] = []  # committed since the drafter drafted last

    def after_prompt(self, output: TargetOutput) -> DraftTree:
        """Returns the first tree, after what the target computed for the prompt."""
        branch = self._look_up()
        return self._draft(self._committed_prompt(output), branch)

    def after(self, path: AcceptedPath, output: TargetOutput) -> DraftTree:
        """Returns the tree after a cycle that has committed `path`, for which the target computed `output`."""
        branch = self._look_up(self._run_lengths())
        if self._is_drafted:
            self._pause.observe(*self._gains(path.accepted_lengths))
        is_run = branch is not None and branch.is_run
        is_paused = not is_run and self._pause.take_cycle()
        # As wide as always, if the drafter reads this cycle alone.
        is_narrow = is_run or is_paused or bool(self._unread)
        self._unread.append(self._committed_path(path, output, is_narrow))
        self._is_drafted = not (is_run or is_paused)
        if self._is_drafted:
            committed, self._unread = CommittedTokens.join(self._unread), []
            return self._draft(committed, branch)
        return self._make_undrafted(branch, is_run)

    def _gains(self, accepted_lengths: Sequence[int]) -> tuple[float, float]:
        """Returns the tokens of the newest cycle and those that the context drafted correctly, per open row."""
        is_open = [length > 0 for length in accepted_lengths]
        right = [0] * len(is_open) if self._context_drafts is None else self._context_drafts.num_right
        num_open = max(sum(is_open), 1)
        return sum(accepted_lengths) / num_open, sum(compress(right, is_open)) / num_open

    def _look_up(self, run_lengths: range = range(0)) -> ContextBranch | None:
        # Before drafting: reading the text, and moving what was found, waits for all that the device was given before.
        context = self._context_drafts
        return None if context is None else context.draft(self._sequences.device, run_lengths)

    def _run_lengths(self) -> range:
        """
        Returns how many tokens the context may draft in a run: more than a tree has, and one less than are missing, as
        the pass chooses one itself. None where shapes are fixed, in chains, whose targets may have to run again what
        was wrong, and where the drafter has much to read.
        """
        settings = self._settings
        if self._context_drafts is None or self._session.shapes.are_fixed or settings.branching_factor == 1:
            return range(0)
        if sum(part.tokens.shape[1] for part in self._unread) >= _MAX_UNREAD_TOKENS:
            return range(0)
        missing = self._sequences.max_length - max(self._sequences.lengths)
        return range(settings.num_assistant_tokens + 1, missing)

    def _draft(self, committed: CommittedTokens, branch: ContextBranch | None) -> DraftTree:
        with self._events.stage("draft"):
            tree = self._with_branch(self._generator.draft_tree(committed), branch)
        self._num_nodes = tree.tokens.shape[1] - 1
        self._events.tree(DraftOrigin("drafter"))
        self._is_drafted = True
        return tree

    def _make_undrafted(self, branch: ContextBranch | None, is_run: bool) -> DraftTree:
        """Returns the context's branch as a tree, or the root alone; as large as always where shapes are fixed."""
        with self._events.stage("draft"):
            root = self._sequences.last_tokens()
            if self._session.shapes.are_fixed:
                tree = self._with_branch(padded_root(root, self._num_nodes, self._settings.longest_path), branch)
            else:
                tree = bare_root(root) if branch is None else branch.alone(root)
        self._events.tree(DraftOrigin("context") if is_run else DraftOrigin("pause", self._pause.num_left))
        return tree

    def _with_branch(self, tree: DraftTree, branch: ContextBranch | None) -> DraftTree:
        if branch is not None:
            tree = branch.added_to(tree, self._settings.branching_factor == 1)
        # All trees are alike where shapes are fixed.
        return tree if self._context_drafts is None else replace(tree, max_depth=self._settings.longest_path)

    def _committed_prompt(self, output: TargetOutput) -> CommittedTokens:
        """Returns what the drafter reads of the prompt: with a cache of the caller's, the part that was run."""
        states, mask = output.states.drafter_input, self._session.prompt.mask
        # With `inputs_embeds` the tokens of the prompt are not known, and only the generated ones are.
        num_known = min(states.shape[1], self._sequences.lengths[0])
        accepted_lengths = [num_known] * len(self._sequences.lengths)
        # A multimodal prompt may mark its images by ids outside the vocabulary; the states tell what is there.
        vocab_size = self._drafter.config.get_text_config().vocab_size
        return CommittedTokens(
            self._sequences.newest(accepted_lengths).clamp(0, vocab_size - 1),
            states[:, -num_known:],
            output.position_ids[:, -num_known:],
            accepted_lengths,
            mask[:, -num_known:] if mask is not None else None,
        )

    def _committed_path(self, path: AcceptedPath, output: TargetOutput, is_narrow: bool = False) -> CommittedTokens:
        """
        Returns what the drafter reads of a cycle: the accepted nodes' states, and the tokens chosen from them; where
        it is not narrow and shapes are fixed, as wide as always.
        """
        is_wide = self._session.shapes.are_fixed and not is_narrow
        nodes = path.nodes if is_wide else path.nodes[:, : max(path.accepted_lengths)]
        return CommittedTokens(
            self._sequences.newest(path.accepted_lengths, nodes.shape[1]),
            pick(output.states.drafter_input, nodes),
            output.position_ids.gather(1, nodes.to(output.position_ids.device)),
            path.accepted_lengths,
        )


def _make_generator(
    session: TargetSession,
    drafter: GumihoModel,
    settings: DraftingSettings,
    chooser: TokenChooser,
    states: TargetStates,
    events: GenerationEvents,
) -> GumihoCandidateGenerator:
    # Not the states themselves: the drafter would keep those of the whole prompt.
    device, dtype = states.last.device, states.last.dtype
    # Behind the committed tokens there are those of a cycle, and then the candidates of the later serial steps.
    num_new = max(settings.longest_path + 1, settings.branching_factor * (drafter.config.num_serial_tokens - 1))
    memory = session.memory
    head, token_ids = head_for_drafting(session.model, settings.draft_vocabulary, device, dtype, memory)
    return GumihoCandidateGenerator(
        drafter,
        lm_head=head,
        settings=settings,
        cache=TreeCache(len(states.last), states.last.shape[1] + session.prompt.num_reserved + num_new, memory),
        shapes=session.shapes,
        token_ids=token_ids,
        peek_noise=chooser.peek_noise,
        # Within a compiled function nobody could be told.
        around_pass=nullcontext if session.shapes.are_compiled else events.each("drafter_pass"),
    )


def _context_drafts(
    session: TargetSession, settings: DraftingSettings, sequences: CommittedSequences
) -> ContextDrafts | None:
    """Returns the drafts from the context, `None` where none are asked for."""
    if not settings.prompt_lookup_num_tokens:
        return None
    mask, starts = session.prompt.mask, [0] * len(sequences.lengths)
    # A prompt given as `inputs_embeds` has a mask, but no tokens.
    if mask is not None and sequences.prompt_length == mask.shape[1]:
        starts = mask.long().argmax(dim=1).tolist()
    return ContextDrafts(
        sequences.tokens_from,
        starts,
        # A path that is longer has no place in any tree.
        min(settings.prompt_lookup_num_tokens, settings.longest_path),
        settings.max_matching_ngram_size,
        session.model.config.get_text_config(decoder=True).vocab_size,
    )
