"""The candidate generator of a generation, and its parts."""

from contextlib import nullcontext

from ..drafting.candidate_generator import GumihoCandidateGenerator
from ..drafting.context_drafts import ContextDrafts
from ..drafting.pause import estimate_break_even
from ..drafting.settings import DraftingSettings
from ..model.modeling_gumiho import GumihoModel
from ..verification.feature_reader import TargetStates
from ..verification.output_head import head_for_drafting
from ..verification.session import TargetSession
from ..verification.tree_cache import TreeCache
from .observers import GenerationEvents
from .sequences import CommittedSequences
from .token_choice import TokenChooser


def make_generator(
    session: TargetSession,
    drafter: GumihoModel,
    settings: DraftingSettings,
    chooser: TokenChooser,
    states: TargetStates,
    events: GenerationEvents,
    prompt_chunk_size: int | None,
) -> GumihoCandidateGenerator:
    """
    Returns the candidate generator of a generation.

    Args:
        session: The target's session, after the prefill.
        drafter: The drafter.
        settings: Its settings for the batch.
        chooser: Chooses the target's tokens; knows the noise of the coming draws.
        states: The target's states of the prompt.
        events: Receives the passes of the drafter.
        prompt_chunk_size: Most tokens of the prompt that are read in one pass; `None` for all.
    """
    # Only their device and dtype: the drafter must not keep the states of the prompt.
    device, dtype = states.last.device, states.last.dtype
    # The committed tokens are followed by those of one cycle, or by the candidates of the later serial steps.
    num_serial = min(drafter.config.num_serial_tokens, settings.tree_depth)
    num_new = max(settings.longest_path + 1, settings.branching_factor * (num_serial - 1))
    memory = session.memory
    head, token_ids = head_for_drafting(session.model, drafter, settings.draft_vocabulary, device, dtype, memory)
    break_even = settings.break_even
    if break_even is None:
        break_even = estimate_break_even(session.model, drafter, settings, len(chooser.sequences.lengths))
    return GumihoCandidateGenerator(
        drafter,
        lm_head=head,
        settings=settings,
        cache=TreeCache(len(states.last), states.last.shape[1] + session.prompt.num_reserved + num_new, memory),
        context=_context_drafts(session, settings, chooser.sequences),
        break_even=break_even,
        shapes=session.shapes,
        token_ids=token_ids,
        head_module=session.model.get_output_embeddings(),
        peek_noise=chooser.peek_noise,
        prompt_chunk_size=prompt_chunk_size,
        # A compiled function cannot call observers.
        around_pass=nullcontext if session.shapes.are_compiled else events.each("drafter_pass"),
    )


def _context_drafts(
    session: TargetSession, settings: DraftingSettings, sequences: CommittedSequences
) -> ContextDrafts | None:
    """Returns the prompt-lookup drafts, or `None` if they are turned off."""
    if not settings.prompt_lookup_num_tokens:
        return None
    mask, starts = session.prompt.mask, [0] * len(sequences.lengths)
    # A prompt given as `inputs_embeds` has a mask, but no tokens.
    if mask is not None and sequences.prompt_length == mask.shape[1]:
        starts = mask.long().argmax(dim=1).tolist()
    return ContextDrafts(
        sequences.tokens_from,
        starts,
        # No tree has a longer path.
        min(settings.prompt_lookup_num_tokens, settings.longest_path),
        settings.max_matching_ngram_size,
        session.model.config.get_text_config(decoder=True).vocab_size,
    )
