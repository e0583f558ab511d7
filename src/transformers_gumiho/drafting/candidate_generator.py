"""The draft trees of a generation: the drafter's, the context's, and when the drafter pauses."""

from collections.abc import Callable
from dataclasses import replace
from itertools import compress
from typing import Any, ClassVar

import torch
from transformers.generation import CandidateGenerator

from ..model.modeling_gumiho import GumihoModel
from ..tree.draft_tree import DraftTree, bare_root, padded_root, single_path
from ..tree.merging import merge_branch, take_better_chain
from ..verification.session import CommittedTokens
from ..verification.tree_cache import TreeCache
from .context_drafts import ContextBranch, ContextDrafts
from .drafter import GumihoDrafter, last_of_rows
from .pause import DraftingPause, DraftOrigin
from .settings import DraftingSettings


# Runs of the context end when the drafter has this many committed tokens to read, because it reads all of them in one
# pass, which takes memory. A pause may add the tokens of its cycles.
_MAX_UNREAD_TOKENS = 256


class GumihoCandidateGenerator(CandidateGenerator):
    """
    Makes the draft tree of each cycle ([`draft_tree`]).

    The drafter pauses while it gains less than it costs ([`DraftingPause`]). After the pause it reads what was
    committed meanwhile. Prompt lookup adds a branch to its trees. If a text repeats itself, prompt lookup drafts
    longer and longer runs alone.

    Args:
        assistant_model ([`GumihoModel`]): The drafter, on any device.
        lm_head: The target's output head. Maps hidden states `(..., H)` to logits `(..., V)`, or with `token_ids` to
            those `(..., K)` of these tokens.
        settings ([`DraftingSettings`]): Shape of the tree.
        cache ([`TreeCache`]): An empty cache for the drafter.
        context ([`ContextDrafts`], *optional*): Drafts by prompt lookup.
        break_even (`float`, *optional*): Tokens per row that a drafted cycle must commit to be as fast as plain
            decoding. By default the drafter never pauses.
        **drafter_kwargs: Further arguments of [`GumihoDrafter`].

    Attributes:
        origin ([`DraftOrigin`]): Where the newest tree comes from.
    """

    # Of transformers' protocol.
    requires_model_outputs = True
    model_kwargs_overrides: ClassVar[dict[str, Any]] = {"output_hidden_states": True}

    def __init__(
        self,
        assistant_model: GumihoModel,
        lm_head: Callable[[torch.Tensor], torch.Tensor],
        settings: DraftingSettings,
        cache: TreeCache,
        context: ContextDrafts | None = None,
        break_even: float | None = None,
        **drafter_kwargs: Any,
    ):
        self.assistant_model = assistant_model
        self.device = assistant_model.fc.weight.device
        self.drafter = GumihoDrafter(assistant_model, lm_head, settings, cache, **drafter_kwargs)
        self._context = context
        self._pause = None if break_even is None else DraftingPause(break_even)
        self._unread: list[CommittedTokens] = []  # committed since the drafter drafted last
        self._num_drafted = 0  # nodes of the drafter's newest tree, root not included
        self.origin = DraftOrigin("drafter")

    def draft_tree(self, committed: CommittedTokens, num_missing: int | None = None) -> DraftTree:
        """
        Returns the tree of the next cycle.

        Args:
            committed: What was committed since the last call: first the prompt, then the tokens of one cycle. On any
                device; the tree is on the same one.
            num_missing: Most tokens that may follow in any row. The target chooses the last of them itself, so no path
                is as long, except in fixed shapes. By default any number may follow.
        """
        max_depth = None if num_missing is None or self.drafter.has_fixed_shapes else num_missing - 1
        if max_depth == 0:
            self.origin = DraftOrigin("end")
            return bare_root(last_of_rows(committed.tokens, committed.accepted_lengths).squeeze(1))
        branch = None
        if self._context is not None:
            branch = self._context.draft(committed.tokens.device, self._run_lengths(num_missing or 0), max_depth)
        self.origin = self._next_origin(committed, is_run=branch is not None and branch.is_run)
        is_drafted = self.origin.source == "drafter"
        # The drafter compiles one width. It cuts the tokens of several cycles to that width itself.
        self._unread.append(committed if is_drafted and not self._unread else committed.narrow())
        if not is_drafted:
            return self._make_undrafted(branch)
        committed, self._unread = CommittedTokens.join(self._unread), []
        tree = self.drafter.draft(committed.to(self.device), max_depth).to(committed.tokens.device)
        self._num_drafted = tree.tokens.shape[1] - 1
        return self._add_branch(tree, branch)

    def _next_origin(self, committed: CommittedTokens, is_run: bool) -> DraftOrigin:
        """Counts the gain of the last cycle, and returns where the next tree comes from."""
        pause = self._pause
        if pause is not None and self._num_drafted and self.origin.source == "drafter":
            is_open = [length > 0 for length in committed.accepted_lengths]
            right = [0] * len(is_open) if self._context is None else self._context.num_right
            num_open = max(sum(is_open), 1)
            pause.observe(sum(committed.accepted_lengths) / num_open, sum(compress(right, is_open)) / num_open)
        if is_run:
            return DraftOrigin("context")
        if pause is not None and pause.take_cycle():
            return DraftOrigin("pause", pause.num_left)
        return DraftOrigin("drafter")

    def _run_lengths(self, num_missing: int) -> range:
        """
        Returns the possible lengths of a run: more tokens than a tree has, and fewer than are missing, because the
        target chooses the last one itself. No runs are made with fixed shapes, when the drafter has many tokens to
        read, and in chains, because a target with recurrent states may have to run rejected tokens again.
        """
        settings, num_unread = self.drafter.settings, sum(part.tokens.shape[1] for part in self._unread)
        if self.drafter.has_fixed_shapes or settings.branching_factor == 1 or num_unread >= _MAX_UNREAD_TOKENS:
            return range(0)
        return range(settings.num_assistant_tokens + 1, num_missing)

    def _make_undrafted(self, branch: ContextBranch | None) -> DraftTree:
        """Returns the context's branch as a tree, or the root alone; in fixed shapes as large as drafted trees."""
        newest = self._unread[-1]
        root = last_of_rows(newest.tokens, newest.accepted_lengths).squeeze(1)
        if self.drafter.has_fixed_shapes:
            return self._add_branch(padded_root(root, self._num_drafted, self.drafter.settings.longest_path), branch)
        return bare_root(root) if branch is None else single_path(root, branch.tokens, branch.log_probs.cumsum(dim=1))

    def _add_branch(self, tree: DraftTree, branch: ContextBranch | None) -> DraftTree:
        """Returns the best nodes of a tree and a branch, as many as the tree has; of a chain, the better path."""
        settings = self.drafter.settings
        if branch is not None:
            merge = take_better_chain if settings.branching_factor == 1 else merge_branch
            tree = merge(tree, branch.tokens, branch.log_probs)
        if self._context is None or not self.drafter.has_fixed_shapes:
            return tree
        # With fixed shapes all trees are equally deep, with or without a branch.
        return replace(tree, max_depth=settings.longest_path)

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
