"""The draft trees of a generation: the drafter's, the context's, and when the drafter pauses."""

from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from ...model.decoding_settings import NEVER_PAUSES, DraftingSettings
from ...model.modeling_gumiho import GumihoModel
from ..tree.draft_tree import DraftTree, bare_root, limit_depth, padded_root, single_path
from ..tree.merging import merge_branch, take_better_chain
from ..verification.session import CommittedTokens, TargetSession
from ..verification.target_states import find_decoder, head_for_drafting
from ..verification.traits import input_device
from ..verification.tree_cache import TreeCache
from .context_drafts import ContextBranch, ContextDrafts
from .drafter import GenerationView, GumihoDrafter, last_of_rows
from .first_cycles import FirstCycles, first_cycles_of


# The drafter pauses above this many lost tokens per row. Earlier gains offset at most MAX_GAINED of them.
MAX_LOST, MAX_GAINED = 2.0, 4.0
# Cycles of the first pause, and of later ones until the losses are regained.
FIRST_PAUSE, LATER_PAUSE = 8, 64
# On a CPU a pass over this many nodes takes about twice as long as one over a single token.
NODES_PER_STEP_ON_CPU = 50


DraftSource = Literal["drafter", "pause", "end"]


@dataclass(frozen=True)
class DraftOrigin:
    """
    Where the tokens of a draft tree come from: the "drafter", also if prompt lookup added some; "pause" if the drafter
    is paused, with prompt-lookup drafts or the root alone; or "end" with the root alone, if no draft can be accepted.
    Of a pause, `num_left` counts the remaining cycles after this one, and `break_even` are the tokens per row that a
    drafted cycle must commit.
    """

    source: DraftSource
    num_left: int = 0
    break_even: float | None = None


class DraftingPause:
    """
    Counts what drafting loses and pauses it, for `num_left` more cycles. No clock is read, so a text is the same in
    every run. `break_even`: tokens per row that a drafted cycle must commit to be as fast as plain decoding.
    """

    def __init__(self, break_even: float):
        self._break_even = break_even
        self._lost = 0.0
        self._next_pause = FIRST_PAUSE
        self.num_left = 0

    def observe(self, tokens: float, right: float = 0.0) -> None:
        """
        Counts a cycle that drafted: the `tokens` that it committed, and of these how many prompt lookup alone would
        have drafted (`right`), both as means over the open rows.
        """
        self._lost = max(self._lost + self._break_even + right - tokens, -MAX_GAINED)
        if self._lost <= 0:
            self._next_pause = FIRST_PAUSE
        if self._lost > MAX_LOST:
            # One more losing cycle after the pause begins the next one.
            self._lost = MAX_LOST
            self.num_left, self._next_pause = self._next_pause, LATER_PAUSE

    def take_cycle(self) -> bool:
        """Returns whether the drafter is paused in the next cycle, and counts that cycle."""
        if self.num_left == 0:
            return False
        self.num_left -= 1
        return True


@dataclass(eq=False)
class GumihoCandidateGenerator(GumihoDrafter, CandidateGenerator):
    """
    Makes the draft tree of each cycle ([`draft_tree`]).

    The drafter pauses while it gains less than it costs ([`DraftingPause`]). After the pause it reads what was
    committed meanwhile. Prompt lookup adds a branch to its trees. `origin` ([`DraftOrigin`]) says where the newest
    tree comes from.

    Args:
        context ([`ContextDrafts`], *optional*): Drafts by prompt lookup.
        break_even (`float`, defaults to 1): Tokens per row that a drafted cycle must commit to be as fast as plain
            decoding. By default the drafter never pauses.
        first_cycles ([`FirstCycles`], *optional*): Counts what the first cycles with this drafter commit.

    The other arguments are those of [`GumihoDrafter`].
    """

    context: ContextDrafts | None = None
    break_even: float = NEVER_PAUSES
    first_cycles: FirstCycles | None = None

    requires_model_outputs: ClassVar[bool] = True
    model_kwargs_overrides: ClassVar[dict[str, Any]] = {"output_hidden_states": True}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pause = DraftingPause(self.break_even)
        self._unread: list[CommittedTokens] = []  # committed since the drafter drafted last
        self._num_drafted = 0  # nodes of the drafter's newest tree, root not included
        self.origin = DraftOrigin("drafter")

    @classmethod
    def after_prompt(
        cls,
        session: TargetSession,
        assistant_model: GumihoModel,
        settings: DraftingSettings,
        generation: GenerationView,
    ) -> "GumihoCandidateGenerator":
        """
        Returns the candidate generator of a generation.

        Args:
            session: The target's session, after the prefill.
            assistant_model: The drafter.
            settings: Its settings for the batch.
            generation: What the drafter sees of the generation.
        """
        # Only their device and dtype: the drafter must not keep the states of the prompt.
        last = session.prefill.states.last
        device, dtype, (num_rows, num_tokens) = last.device, last.dtype, last.shape[:2]
        num_new = cls._num_uncommitted(assistant_model, settings)
        target, memory = session.model, session.memory
        head, token_ids = head_for_drafting(target, assistant_model, settings.draft_vocabulary, device, dtype)
        is_own = assistant_model.config.owns_head
        head_module = assistant_model.lm_head if is_own else target.get_output_embeddings()
        source, break_even = assistant_model.config.converted_from, settings.break_even
        if break_even is None:
            num_computed = session.tokens_computed(settings.num_assistant_tokens)
            break_even = estimate_break_even(target, assistant_model, settings, num_rows, num_computed)
        return cls(
            assistant_model,
            lm_head=head,
            settings=settings,
            cache=TreeCache(num_rows, num_tokens + session.num_reserved + num_new, memory),
            shapes=session.shapes,
            token_ids=token_ids,
            head_module=head_module,
            generation=generation,
            context=_context_drafts(session, settings, generation, num_rows),
            break_even=break_even,
            first_cycles=first_cycles_of(target, assistant_model, source) if source is not None else None,
        )

    @staticmethod
    def _num_uncommitted(assistant_model: GumihoModel, settings: DraftingSettings) -> int:
        """Returns how many slots of the drafter's cache a cycle needs beside those of the text."""
        # The committed tokens are followed by those of one cycle, or by the candidates of the later serial steps.
        num_serial = min(assistant_model.config.num_serial_tokens, settings.tree_depth)
        return max(settings.longest_path + 1, settings.branching_factor * (num_serial - 1))

    def draft_tree(
        self, committed: CommittedTokens, num_missing: int | None = None, max_depth: int | None = None
    ) -> DraftTree:
        """
        Returns the tree of the next cycle.

        Args:
            committed: What was committed since the last call: first the prompt, then the tokens of one cycle. On any
                device; the tree is on the same one.
            num_missing: Most tokens that may follow in any row; by default any number. The target chooses the last of
                them itself, so no path is as long, except in fixed shapes.
            max_depth: Depth below which no node may be, also in fixed shapes: the target's positions end there.
        """
        # 1. The root alone, where no draft can be accepted.
        if num_missing is not None and not self.shapes.are_fixed:
            max_depth = num_missing - 1 if max_depth is None else min(max_depth, num_missing - 1)
        if max_depth == 0:
            self.origin = DraftOrigin("end")
            return bare_root(last_of_rows(committed.tokens, committed.accepted_lengths).squeeze(1))
        # 2. What the text says, and whether the drafter drafts.
        branch = None if self.context is None else self.context.draft(committed.tokens.device)
        self.origin = self._next_origin(committed)
        is_drafted = self.origin.source == "drafter"
        # The drafter compiles one width. It cuts the tokens of several cycles to that width itself.
        is_next = is_drafted and not self._unread
        self._unread.append(committed if is_next else committed.narrow())
        if not is_drafted:
            return self._make_undrafted(branch, max_depth)
        # 3. The drafter reads what it has missed, and its tree competes with the branch.
        unread = CommittedTokens.join(self._unread).to(self.device)
        self._unread = []
        tree = self.draft(unread).to(committed.tokens.device)
        self._num_drafted = tree.tokens.shape[1] - 1
        # The nodes are those of any cycle, so that as many tokens are accepted; the pass needs no deeper ones.
        return self._limit(self._add_branch(tree, branch), max_depth)

    def _limit(self, tree: DraftTree, max_depth: int | None) -> DraftTree:
        if max_depth is None:
            return tree
        return limit_depth(tree, max_depth, is_path=self.settings.branching_factor == 1)

    def _next_origin(self, committed: CommittedTokens) -> DraftOrigin:
        """Counts the gain of the last cycle, and returns where the next tree comes from."""
        if self._num_drafted and self.origin.source == "drafter":
            is_open = [length > 0 for length in committed.accepted_lengths]
            right = [0] * len(is_open) if self.context is None else self.context.num_right
            num_open = max(sum(is_open), 1)
            tokens = sum(committed.accepted_lengths) / num_open
            self._pause.observe(tokens, sum(compress(right, is_open)) / num_open)
            if self.first_cycles is not None:
                self.first_cycles.observe(tokens)
        if self._pause.take_cycle():
            return DraftOrigin("pause", self._pause.num_left, self.break_even)
        return DraftOrigin("drafter")

    def _make_undrafted(self, branch: ContextBranch | None, max_depth: int | None) -> DraftTree:
        """Returns the context's branch as a tree, or the root alone; in fixed shapes as large as drafted trees."""
        newest = self._unread[-1]
        root = last_of_rows(newest.tokens, newest.accepted_lengths).squeeze(1)
        if self.shapes.are_fixed:
            # A branch is merged into the whole path: a node counts as reached if all that are known above it agree.
            longest = self.settings.longest_path if branch is None else self._num_drafted
            tree = self._add_branch(padded_root(root, self._num_drafted, longest), branch)
            return self._limit(tree, max_depth)
        if branch is None:
            return bare_root(root)
        tokens, scores = branch
        return single_path(root, tokens[:, :max_depth], scores[:, :max_depth])

    def _add_branch(self, tree: DraftTree, branch: ContextBranch | None) -> DraftTree:
        """Returns the best nodes of a tree and a branch, as many as the tree has; of a chain, the better path."""
        settings = self.settings
        if branch is not None:
            merge = take_better_chain if settings.branching_factor == 1 else merge_branch
            tree = merge(tree, *branch)
        if self.context is None or not self.shapes.are_fixed:
            return tree
        # With fixed shapes all trees are equally deep, with or without a branch, drafted or not.
        longest = settings.longest_path
        return replace(tree, depths=tree.depths.clamp(max=longest), max_depth=longest)

    def get_candidates(
        self, input_ids: torch.Tensor, model_outputs: Any = None, n_last_matches: int = 0, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """
        Returns a text `(1, T)` and the best path of the next tree after it: transformers' protocol of candidate
        generators, for a text without padding, and a drafter that reads what the target's output head reads.

        Args:
            input_ids (`(1, T)`): The text.
            model_outputs: Outputs of the target's newest pass, with `hidden_states`; nothing is drafted without any.
            n_last_matches: Number of candidates that this pass accepted.
            **kwargs: Ignored.
        """
        if model_outputs is None:
            return input_ids, None
        states = model_outputs.hidden_states[-1]
        if self._num_drafted:  # all states of the prompt belong to committed tokens
            states = states[:, : n_last_matches + 1]
        num_new, length = states.shape[1], input_ids.shape[1]
        positions = torch.arange(length - num_new - 1, length - 1, device=input_ids.device)[None]
        tree = self.draft_tree(CommittedTokens(input_ids[:, -num_new:], states, positions, [num_new]))
        # Nodes are sorted by score: the first of the deepest ones is the best of them.
        nodes = tree.ancestors[0, tree.depths[0].argmax()].nonzero().squeeze(1)
        return torch.cat((input_ids, tree.tokens[:, nodes[1:]]), dim=1), None


def _context_drafts(
    session: TargetSession, settings: DraftingSettings, generation: GenerationView, num_rows: int
) -> ContextDrafts | None:
    """Returns the drafts by prompt lookup, if the settings ask for them."""
    # No tree has a longer path.
    num_tokens = min(settings.prompt_lookup_num_tokens, settings.longest_path)
    if num_tokens == 0:
        return None
    mask, starts = session.prompt.mask, [0] * num_rows
    # A prompt given as `inputs_embeds` has a mask, but no tokens.
    if mask is not None and generation.prompt_length == mask.shape[1]:
        starts = mask.long().argmax(dim=1).tolist()
    ngram_size, vocab_size = settings.max_matching_ngram_size, session.traits.config.vocab_size
    return ContextDrafts(generation.tokens_from, starts, num_tokens, ngram_size, vocab_size)


def estimate_break_even(
    target: PreTrainedModel,
    drafter: GumihoModel,
    settings: DraftingSettings,
    num_rows: int,
    num_computed: float | None = None,
) -> float:
    """
    Returns the time of a drafted cycle in steps of plain decoding, as `1 + D / T`: `D` counts the parameters of all
    passes of the drafter in a cycle, `T` those of the target's layers and output head; of experts, those that one
    token runs. On a CPU, `num_rows * nodes / 50` is added, because a pass takes longer for more tokens; `num_computed`
    are these nodes with what else the pass computes in each row. `gumiho tune` measures the value.
    """
    estimate = 1 + _drafter_parameters(drafter, settings) / _target_parameters(target, drafter)
    if input_device(target).type == "cpu":
        num_nodes = settings.num_assistant_tokens if num_computed is None else num_computed
        estimate += num_rows * num_nodes / NODES_PER_STEP_ON_CPU
    return estimate


def _drafter_parameters(drafter: GumihoModel, settings: DraftingSettings) -> int:
    """Counts the parameters that the passes of a cycle read, once per pass."""
    config, vocabulary = drafter.config, settings.draft_vocabulary
    num_serial = min(config.num_serial_tokens, settings.tree_depth)
    num_heads = settings.tree_depth - num_serial
    text_config = config.get_text_config()
    num_tokens = config.draft_vocab_size or text_config.vocab_size
    if vocabulary is not None:
        num_tokens = len(vocabulary)
    head = num_tokens * text_config.hidden_size
    # `fc` of an EAGLE-3 head or a block drafter reads the committed tokens alone.
    num_fusions = num_serial + bool(num_heads) if drafter.serial_head.fuses_tokens else 1
    layers = _size(drafter.serial_layers, _experts_per_token(text_config))
    count = num_serial * (layers + head) + num_fusions * _size(drafter.fc)
    if config.is_block:
        count += layers + head + num_tokens * config.markov_rank
    elif num_heads:
        count += head + num_heads * _size(drafter.mlp) // config.num_parallel_heads
        count += 0 if drafter.transition is None else _size(drafter.transition)
    return count


def _target_parameters(target: PreTrainedModel, drafter: GumihoModel) -> int:
    """Counts the parameters that a step reads: layers and output head. An embedding gives one row per token."""
    text_config, decoder = drafter.config.get_text_config(), find_decoder(target)
    per_token = _experts_per_token(target.config.get_text_config(decoder=True))
    embeddings = [module for module in decoder.modules() if isinstance(module, nn.Embedding)]
    layers = _size(decoder, per_token) - sum(map(_size, embeddings))
    return layers + text_config.vocab_size * text_config.hidden_size


def _size(module: nn.Module, experts_per_token: int | None = None) -> int:
    """Returns how many numbers of a module's parameters a pass over one token reads."""
    size = 0
    for parameter in module.parameters():
        share = 1.0
        # transformers keeps the weights of all experts in one tensor (experts, rows, columns).
        if experts_per_token is not None and parameter.ndim == 3:
            share = min(experts_per_token / len(parameter), 1.0)
        size += round(parameter.numel() * share)
    return size


def _experts_per_token(config: Any) -> int | None:
    """Returns how many experts a token runs, by the text config of a model; `None` where it has none."""
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    return next((value for name in names if (value := getattr(config, name, None))), None)
