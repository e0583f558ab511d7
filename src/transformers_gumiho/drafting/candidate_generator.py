"""The draft trees of a generation: the drafter's, the context's, and when the drafter pauses."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import CandidateGenerator
from transformers.utils import ModelOutput

from ..model.modeling_gumiho import GumihoModel
from ..tree.draft_tree import DraftTree, bare_root, padded_root, single_path
from ..tree.merging import merge_branch, take_better_chain
from ..user_errors import UserValueError
from ..verification.feature_reader import projected_states
from ..verification.output_head import head_for_drafting
from ..verification.placement import input_device
from ..verification.requirements import check_pair
from ..verification.session import CommittedTokens
from ..verification.tree_cache import GROWTH, TreeCache
from .context_drafts import ContextBranch, ContextDrafts
from .drafter import GumihoDrafter, last_of_rows
from .pause import DraftingPause, DraftOrigin
from .settings import DraftingSettings


# Runs of the context end when the drafter has this many committed tokens to read, because it reads all of them in one
# pass, which takes memory. A pause may add the tokens of its cycles.
_MAX_UNREAD_TOKENS = 256


class GumihoCandidateGenerator(CandidateGenerator):
    """
    Makes the draft tree of each cycle ([`draft_tree`]), or the best path of it ([`get_candidates`], for transformers'
    own loop of assisted decoding).

    The drafter pauses while it gains less than it costs ([`DraftingPause`]). After the pause it reads what was
    committed meanwhile. Prompt lookup adds a branch to its trees. If a text repeats itself, prompt lookup drafts
    longer and longer runs alone.

    Args:
        assistant_model ([`GumihoModel`]): The drafter, on any device.
        lm_head: The target's output head. Maps hidden states `(..., H)` to logits `(..., V)`, or with `token_ids` to
            those `(..., K)` of these tokens.
        settings ([`DraftingSettings`]): Shape of the tree.
        cache ([`TreeCache`]): An empty cache for the drafter.
        max_length (`int`, *optional*): Maximum length of a text with its prompt, in tokens. Limits `get_candidates`.
        eos_token_ids: Tokens that end a text. `get_candidates` drafts nothing after them.
        read_last (*optional*): For `get_candidates`: maps the target's last hidden states `(1, T, ...)` to the inputs
            of its output projection, for targets that compute something in between.
        context ([`ContextDrafts`], *optional*): Drafts by prompt lookup.
        break_even (`float`, *optional*): Tokens per row that a drafted cycle must commit to be as fast as plain
            decoding. By default the drafter never pauses.
        **drafter_kwargs: Further arguments of [`GumihoDrafter`].

    Attributes:
        origin ([`DraftOrigin`]): Where the newest tree comes from.
    """

    requires_model_outputs = True

    def __init__(
        self,
        assistant_model: GumihoModel,
        lm_head: Callable[[torch.Tensor], torch.Tensor],
        settings: DraftingSettings,
        cache: TreeCache,
        max_length: int | None = None,
        eos_token_ids: Collection[int] = (),
        read_last: Callable[[torch.Tensor], torch.Tensor] | None = None,
        context: ContextDrafts | None = None,
        break_even: float | None = None,
        **drafter_kwargs: Any,
    ):
        self.assistant_model = assistant_model
        layer_ids = assistant_model.config.target_layer_ids
        # Indices into the target's hidden states; the first of them are the embeddings.
        self._state_indices = [-1] if layer_ids is None else [number + 1 for number in layer_ids]
        # For several layers all states are requested, because releases before 5.23 number them differently.
        self.model_kwargs_overrides: dict[str, Any] = {"output_hidden_states": -1 if layer_ids is None else True}
        self.device = assistant_model.fc.weight.device
        self.drafter = GumihoDrafter(assistant_model, lm_head, settings, cache, **drafter_kwargs)
        self.max_length = max_length
        self.eos_token_ids = frozenset(eos_token_ids)
        self._read_last = read_last
        self._has_read_prompt = False
        self._context = context
        self._pause = None if break_even is None else DraftingPause(break_even)
        self._unread: list[CommittedTokens] = []  # committed since the drafter drafted last
        self._num_drafted = 0  # nodes of the drafter's newest tree, root not included
        self.origin = DraftOrigin("drafter")

    @classmethod
    def for_assisted_decoding(
        cls, target: PreTrainedModel, assistant_model: GumihoModel, generation_config: GenerationConfig
    ) -> "GumihoCandidateGenerator":
        """
        Returns a generator that drafts chains for one call of transformers' own loop of assisted decoding.

        Args:
            target: The model that verifies the candidates.
            assistant_model: The drafter, with its settings in its `generation_config`; `branching_factor` is 1 here.
            generation_config: The target's, as `generate()` has prepared it.

        Raises:
            ValueError: The drafter does not fit the target or needs an embedding that the target cannot share, or one
                of its settings is out of range.
        """
        check_pair(target, assistant_model)
        if not assistant_model.config.has_embedding:
            assistant_model.share_embedding(target)
        settings = DraftingSettings.from_generation_config(
            assistant_model.generation_config,
            assistant_model.config,
            sampling_temperature=None,
            device_type=target.device.type,
        )
        settings = replace(settings, branching_factor=1)
        head, token_ids = head_for_drafting(
            target, assistant_model, settings.draft_vocabulary, device=input_device(target), dtype=target.dtype
        )
        eos_token_id = generation_config.eos_token_id
        return cls(
            assistant_model,
            head,
            settings,
            TreeCache(1, min(generation_config.max_length, GROWTH) + settings.tree_depth),
            max_length=generation_config.max_length,
            eos_token_ids=[eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or [],
            read_last=partial(projected_states, target),
            token_ids=token_ids,
        )

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
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        *,
        hidden_states: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """
        Returns `input_ids` followed by the best of the tree's deepest paths, for one sequence.

        Args:
            input_ids (`(1, T)`): The committed text.
            model_kwargs: May have the `position_ids` and the `attention_mask` of the text, both `(1, T)`. By default
                positions count from 0, and there is no padding.
            model_outputs: Outputs of the target's newest pass, with `hidden_states`.
            is_first_iteration: Whether the target has not run yet. Then nothing is drafted.
            n_last_matches: Number of candidates of the last call that were accepted.
            hidden_states (`(1, n, k * H)`): Replaces `model_outputs` and `n_last_matches`: the states, of the k layers
                that the drafter reads, that predicted the newest `n` tokens. In the first call these are all tokens
                but the first, later the tokens committed since the last call.

        Returns:
            Candidates `(1, T + depth)`, and no candidate logits: drafted tokens are verified as point masses.

        Raises:
            ValueError: There are no hidden states, or several sequences.
        """
        if input_ids.shape[0] != 1:
            raise UserValueError(
                f"A single path fits one sequence, got a batch of {input_ids.shape[0]}; use `draft_tree`."
            )
        budget = self.drafter.settings.tree_depth
        if self.max_length is not None:
            # The target chooses the last token itself.
            budget = min(budget, self.max_length - input_ids.shape[1] - 1)
        if is_first_iteration or budget < 1:
            return input_ids, None
        if hidden_states is None:
            hidden_states = self._committed_states(model_outputs, n_last_matches)
        path = best_path(self._draft_after(input_ids, hidden_states, model_kwargs or {}))[:, :budget]
        return torch.cat((input_ids, self._until_end(path).to(input_ids.device)), dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Does nothing: settings stay as they are. Earlier releases of transformers ask for this method."""

    def _committed_states(self, model_outputs: ModelOutput | None, n_last_matches: int) -> torch.Tensor:
        """Returns what the drafter reads `(1, n, k * H)` of the committed tokens in the target's newest pass."""
        hidden_states = getattr(model_outputs, "hidden_states", None)
        if not hidden_states:
            given = "no outputs" if model_outputs is None else f"a {type(model_outputs).__name__} without them"
            raise UserValueError(
                f"Gumiho drafts from the target's last hidden states, but got {given}. Run the target with "
                f"`output_hidden_states=True` and pass what it returns as `model_outputs`, or pass them as "
                f"`hidden_states`."
            )
        last = len(hidden_states) - 1
        states = [
            self._read_last(hidden_states[index]) if self._read_last and index in (-1, last) else hidden_states[index]
            for index in self._state_indices
        ]
        read = torch.cat([layer_states.to(self.device) for layer_states in states], dim=-1)
        # All states of the prompt belong to committed tokens.
        return read[:, : n_last_matches + 1] if self._has_read_prompt else read

    def _draft_after(
        self, input_ids: torch.Tensor, hidden_states: torch.Tensor, model_kwargs: dict[str, Any]
    ) -> DraftTree:
        """Drafts after `input_ids` `(1, T)`, from the states `(1, n, H)` that its newest tokens were chosen from."""
        # With `inputs_embeds` a prompt has states, but no tokens.
        num_new = min(hidden_states.shape[1], input_ids.shape[1])
        position_ids, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        # Multimodal decoders have several positions per token, the first of which are those of the text.
        position_ids = position_ids.flatten(0, -2)[:1]
        newest = slice(-num_new - 1, -1)  # the states are those of the tokens before
        # A multimodal prompt may mark its images by ids outside the vocabulary.
        vocab_size = self.assistant_model.config.get_text_config().vocab_size
        tree = self.draft_tree(
            CommittedTokens(
                input_ids[:, -num_new:].clamp(0, vocab_size - 1),
                hidden_states[:, -num_new:],
                position_ids[:, newest],
                [num_new],
                mask[:, newest] if mask is not None and not self._has_read_prompt else None,
            )
        )
        self._has_read_prompt = True
        return tree

    def _until_end(self, path: torch.Tensor) -> torch.Tensor:
        """Returns the path `(1, depth)` up to its first end-of-sequence token."""
        ends = [index for index, token in enumerate(path[0].tolist()) if token in self.eos_token_ids]
        return path[:, : ends[0] + 1] if ends else path


def best_path(tree: DraftTree) -> torch.Tensor:
    """Returns the tokens `(1, depth)` of the best of the deepest paths of a tree of one row, without the root."""
    # Nodes are sorted by score, so the first of the deepest ones is the best of them.
    deepest = tree.depths[0].argmax()
    nodes = tree.ancestors[0, deepest].nonzero().squeeze(1)
    return tree.tokens[:, nodes[1:]]
