"""The draft trees of a generation: what the drafter is told, when it drafts, and which part of a tree is verified."""

from contextlib import nullcontext
from dataclasses import replace

from transformers import PreTrainedModel
from transformers.utils import logging

from ..drafting.candidate_generator import GumihoCandidateGenerator
from ..drafting.committed_tokens import CommittedTokens
from ..drafting.context_branch import ContextBranch
from ..drafting.context_drafts import ContextDrafts
from ..drafting.settings import DraftingSettings
from ..drafting.tree_size import COMPILED_TREE_SIZES, TREE_SIZES, row_weights
from ..drafting.tree_sizing import TreeSizing
from ..model.modeling_gumiho import GumihoModel
from ..target.feature_reader import TargetStates
from ..target.machine import machine_and_dtype
from ..target.output_head import head_for_drafting
from ..target.session import TargetOutput, TargetSession
from ..target.tree_cache import TreeCache
from ..tree.draft_tree import DraftTree, bare_root
from ..tree.verification import AcceptedPath, pick
from .observers import GenerationEvents
from .sequences import CommittedSequences
from .token_choice import TokenChooser


logger = logging.get_logger(__name__)

# Committed tokens after which a run ends, so that the drafter reads them: all at once, which takes memory.
_MOST_UNTOLD = 256


class UpcomingTrees:
    """
    The draft trees of a generation, one for each cycle: the drafter's, and what the context drafts. With `cycle_costs`
    a tree has the size that makes most of the cycle's time, and where the drafter is not worth its time, it is what
    the context drafts, or the root alone. A text that goes on as its context did is drafted by that alone, in longer
    and longer runs. What was committed meanwhile is kept for when the drafter drafts again.

    Args:
        session: Of the target, which has read the prompt.
        drafter: The drafter.
        settings: Its settings.
        chooser: Of the target's tokens.
        output: What the target computed for the prompt.
        events: Told of drafting, and of why a tree has its size.
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
        self._sizing = _tree_sizing(session, settings, chooser)
        self._untold: list[CommittedTokens] = []  # committed since the drafter drafted last

    def after_prompt(self, output: TargetOutput) -> DraftTree:
        """Returns the first tree, after what the target computed for the prompt."""
        branch = self._look_up()
        return self._draft(self._committed_prompt(output), branch)

    def after(self, path: AcceptedPath, output: TargetOutput) -> DraftTree:
        """Returns the tree after a cycle that has committed `path`, for which the target computed `output`."""
        branch, run = self._look_up(self._run_lengths()), None
        sizing, context = self._sizing, self._context_drafts
        if sizing is not None:
            sizing.observe(path.accepted_lengths, () if context is None else context.num_right)
        at_rest = sizing if sizing is not None and sizing.pauses() else None
        if branch is not None and context is not None and branch.is_run:
            if sizing is None or sizing.takes_run(branch):
                run = branch
            else:
                branch = context.refuse(branch)
        # As wide as always, if the drafter is told of this cycle alone.
        is_narrow = run is not None or at_rest is not None or bool(self._untold)
        self._untold.append(self._committed_path(path, output, is_narrow))
        if run is not None:
            return self._run(run)
        if at_rest is not None:
            return self._at_rest(at_rest, branch)
        committed, self._untold = CommittedTokens.join(self._untold), []
        return self._draft(committed, branch)

    def _look_up(self, run_lengths: range = range(0)) -> ContextBranch | None:
        # Before drafting: reading the text, and moving what was found, waits for all that the device was given before.
        context = self._context_drafts
        return None if context is None else context.draft(self._sequences.device, run_lengths)

    def _run_lengths(self) -> range:
        """
        Returns how many tokens the context may draft in a run: more than trees have (where their sizes are chosen,
        than it drafts otherwise), and one less than are missing, as the pass chooses one itself. None where shapes are
        fixed, in chains, whose targets may have to run again what was wrong, and where the drafter has much to read
        (in a pause it reads nothing either way).
        """
        settings, sizing, context = self._settings, self._sizing, self._context_drafts
        if context is None or self._session.shapes.are_fixed or settings.branching_factor == 1:
            return range(0)
        num_untold = sum(part.tokens.shape[1] for part in self._untold)
        if num_untold >= _MOST_UNTOLD and not (sizing is not None and sizing.is_pausing):
            return range(0)
        usual = settings.num_assistant_tokens if sizing is None else context.num_tokens
        return range(usual + 1, self._sequences.max_length - max(self._sequences.lengths))

    def _run(self, branch: ContextBranch) -> DraftTree:
        length = branch.tokens.shape[1]
        with self._events.stage("draft"):
            tree = branch.alone(self._sequences.last_tokens(), length, length)
        if self._sizing is not None:
            self._events.tree_sized(self._sizing.reason)
        return tree

    def _draft(self, committed: CommittedTokens, branch: ContextBranch | None) -> DraftTree:
        settings, sizing = self._settings, self._sizing
        weights = [] if sizing is None else self._row_weights()
        is_chain = settings.branching_factor == 1
        with self._events.stage("draft"):
            if sizing is not None and not is_chain and not self._session.shapes.are_fixed:
                num_drafted = sizing.num_to_draft(settings.num_assistant_tokens, weights, branch)
                self._generator.drafter.draft_at_most(num_drafted)
            tree = self._generator.draft_tree(committed)
            if sizing is not None:
                tree = sizing.weigh(tree)
            if branch is not None:
                tree = branch.added_to(tree, is_chain)
            if self._context_drafts is not None:
                # All trees are alike where shapes are fixed.
                tree = replace(tree, max_depth=settings.longest_path)
            if sizing is None:
                return tree
            # On a GPU the host waits for the scores here, once more in a cycle than without costs.
            tree = sizing.cut(tree, weights, branch)
        self._events.tree_sized(sizing.reason)
        return tree

    def _at_rest(self, sizing: TreeSizing, branch: ContextBranch | None) -> DraftTree:
        settings = self._settings
        most = settings.tree_depth if settings.branching_factor == 1 else settings.num_assistant_tokens
        with self._events.stage("draft"):
            root, size = self._sequences.last_tokens(), sizing.size_at_rest(self._row_weights(), branch)
            tree = bare_root(root) if branch is None or size == 0 else branch.alone(root, size, most)
        self._events.tree_sized(sizing.reason)
        return tree

    def _row_weights(self) -> list[float]:
        sequences = self._sequences
        # Where rows end together, what one has beyond the last end is cut off.
        has_enough = [not sequences.is_open(row) for row in range(len(sequences.lengths))]
        if None not in sequences.ends:
            has_enough = [length >= sequences.final_length for length in sequences.lengths]
        rows = zip(sequences.lengths, has_enough, strict=True)
        return row_weights([None if is_enough else length for length, is_enough in rows])

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


def warn_of_other_machine(target: PreTrainedModel, settings: DraftingSettings) -> None:
    """Warns, once, where what cycles cost was measured on another machine than the target's, or in another dtype."""
    table = settings.cycle_costs
    if table is None:
        return
    here = machine_and_dtype(target)
    if (table.machine, table.dtype) != here:
        logger.warning_once(
            f"The drafter's `cycle_costs` were measured on {table.machine!r} in {table.dtype}, and this is "
            f"{here[0]!r} in {here[1]}: trees may have other sizes than the best. Let `gumiho tune` measure here, or "
            f"set `cycle_costs` to None in the drafter's `generation_config`."
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


def _tree_sizing(session: TargetSession, settings: DraftingSettings, chooser: TokenChooser) -> TreeSizing | None:
    """Returns what fits the trees to their costs, `None` where these are not known."""
    table = settings.cycle_costs
    if table is None:
        return None
    return TreeSizing(
        table.for_batch(chooser.batch_size, chooser.do_sample),
        table.curves(chooser.do_sample),
        chooser.rows_together,
        chooser.in_lockstep,
        COMPILED_TREE_SIZES if session.shapes.are_fixed else TREE_SIZES,
    )
