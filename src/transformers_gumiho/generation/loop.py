"""The generation loop: draft a tree, verify it in one pass of the target, commit the accepted path."""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..internals import CACHE_NAME, given_in_call
from ..model.decoding_settings import LOOKUP_SETTINGS, SETTINGS_OF_CALLS, DraftingSettings, overridden
from ..model.modeling_gumiho import GumihoModel
from ..model.wrappers import in_eval_mode
from .drafting.blocks import BlockCandidateGenerator
from .drafting.candidate_generator import DraftSource, GumihoCandidateGenerator
from .drafting.drafter import GenerationView
from .observers import GenerationEvents, GenerationObserver
from .sequences import CommittedSequences
from .token_choice import TokenChooser
from .tree.draft_tree import DraftTree, bare_root
from .verification.prompt import open_session
from .verification.session import TargetSession
from .verification.target_states import FeatureReader
from .verification.traits import TargetTraits, input_device


logger = logging.get_logger(__name__)


@dataclass
class GumihoGenerateOutput(GenerateDecoderOnlyOutput):
    """
    Output of `generate(assistant_model=<GumihoModel>, return_dict_in_generate=True)`.

    Args:
        accepted_lengths (`list[list[int]]`):
            For each row, the tokens committed by each verification cycle: accepted drafts and the bonus token. The
            mean of the drafted cycles is the acceptance length tau. The mean of all cycles is the tokens per pass. The
            first token comes from the prefill and counts in no cycle. A sampled row that is far ahead of the others
            takes one token per cycle.
        draft_origins (`list[str]`):
            For each cycle, where its drafts came from, the same for all rows: the "drafter", also where prompt lookup
            added some; "pause" while the drafter paused; or "end" if nothing was drafted, because one token was
            missing.
        tree_sizes (`list[int]`):
            For each cycle, the number of draft tokens verified in every row. While the drafter is paused, this is the
            number of prompt-lookup drafts, or 0. Trees are smaller where few tokens are missing, and 0 where one is.
            With a static cache it is the same in every cycle.

    In a batch, `scores`, `logits` and `hidden_states` are zero for a row that has ended before the others, because the
    target does not run on padding.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from transformers_gumiho import GumihoModel

    >>> tokenizer = AutoTokenizer.from_pretrained("examples/demo_pair/target")
    >>> target = AutoModelForCausalLM.from_pretrained("examples/demo_pair/target", dtype="float32")
    >>> gumiho = GumihoModel.from_pretrained("examples/demo_pair/gumiho", dtype="float32")
    >>> inputs = tokenizer("def read(self):", return_tensors="pt")
    >>> output = target.generate(
    ...     **inputs, assistant_model=gumiho, max_new_tokens=33, return_dict_in_generate=True
    ... )
    >>> lengths = output.accepted_lengths[0]
    >>> sum(lengths)  # without the first token
    32
    >>> sum(lengths) / len(lengths) > 2  # tau
    True

    ```
    """

    accepted_lengths: list[list[int]] | None = None
    draft_origins: list[DraftSource] | None = None
    tree_sizes: list[int] | None = None


def decode_with_tree(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: GumihoModel,
    traits: TargetTraits,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    observers: tuple[GenerationObserver, ...] = (),
    **model_kwargs: Any,
) -> GumihoGenerateOutput | torch.Tensor:
    """
    Decodes with a Gumiho drafter. Called by `generate()`, with what it prepared, the target's traits and the call's
    observers. Returns token ids `(B, T + new)`, or a [`GumihoGenerateOutput`] with `return_dict_in_generate=True`.
    """
    settings = _drafting_settings(traits, target, assistant_model, generation_config, len(input_ids))
    sequences = CommittedSequences(input_ids, stopping_criteria, generation_config, streamer)
    events = GenerationEvents(observers)
    events.report("on_generation_begin", len(input_ids))
    with ExitStack() as running:
        # Dropout would draw numbers between those of the target's tokens.
        running.enter_context(in_eval_mode(assistant_model))
        running.callback(events.report, "on_generation_end", sequences.new_tokens)
        with events.stage("prompt"):
            max_new_tokens = sequences.max_length - sequences.prompt_length
            reader = _reader_for(assistant_model, target)
            reads_passes = reader.read_target is not None and not observers
            session = open_session(
                reader, traits, input_ids, generation_config, model_kwargs, settings, max_new_tokens, reads_passes
            )
            # Entered here, because it must return the entries of the caller's cache if an observer raises an error.
            running.enter_context(session)
        events.report("on_prompt", input_ids, session.prefill.states, session.prompt.mask)
        chooser = TokenChooser(
            sequences, logits_processor, bool(generation_config.do_sample), session.shapes, traits.is_chain
        )
        running.callback(chooser.return_unused_draws)
        # The prefill is a pass over a tree, too: a root alone, the prompt's end, whose token does not matter.
        tree = bare_root(input_ids.new_zeros(len(input_ids)))
        sequences.records.add_prompt(session.prefill.hidden_states)
        chooser.commit_path(tree, session.prefill.logits)
        if not sequences.finished:
            chunk_size = generation_config.prefill_chunk_size
            tree = _run_cycles(session, assistant_model, settings, sequences, chooser, events, chunk_size)
        new_ids = sequences.final_ids()[:, sequences.prompt_length :]
        session.finish(sequences.num_cached_by_plain_decoding(), new_ids, tree)
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return sequences.final_ids()
    return _output(sequences, session.prompt.cache)


def _reader_for(drafter: GumihoModel, target: PreTrainedModel) -> FeatureReader:
    """Returns the reader of the target's states that a drafter needs."""
    # Only a block drafter reads a state without the token after it.
    read_target = drafter.read_target if drafter.config.is_block else None
    return FeatureReader(target, drafter.config.layers_read(target.config), read_target)


def _run_cycles(
    session: TargetSession,
    drafter: GumihoModel,
    settings: DraftingSettings,
    sequences: CommittedSequences,
    chooser: TokenChooser,
    events: GenerationEvents,
    prompt_chunk_size: int | None,
) -> DraftTree:
    """Runs cycles until every row has ended. Returns the newest tree."""
    view = GenerationView(
        sequences.prompt_length,
        prompt_chunk_size,
        partial(events.stage, "drafter_pass") if events.observers else nullcontext,
        sequences.tokens_from,
        chooser.peek_noise,
    )
    generator = BlockCandidateGenerator if drafter.config.is_block else GumihoCandidateGenerator
    drafts = generator.after_prompt(session, drafter, settings, view)
    vocab_size = drafter.config.get_text_config().vocab_size
    committed = session.committed_prompt(sequences.prefix(sequences.lengths[0]), vocab_size)
    while not sequences.finished:
        # 1. Draft a tree after the committed tokens.
        with events.stage("draft"):
            tree = drafts.draft_tree(committed, sequences.num_missing, session.max_depth)
        events.report("on_tree", drafts.origin)
        # 2. Verify all of its nodes in one pass of the target.
        with events.stage("verify"):
            output = session.run_tree(tree, [not is_open for is_open in sequences.open_rows])
        # 3. Commit the drafts that are the target's own tokens, and the target's token after them.
        path = chooser.commit_path(tree, output.logits)
        events.cycle(tree, path)
        sequences.records.add_cycle(tree, drafts.origin.source, path, output.hidden_states)
        # 4. Roll the cache back to the accepted path.
        committed = session.keep(path, output)
        events.states(output.states, path)
    return tree


def _output(sequences: CommittedSequences, cache: Any) -> GumihoGenerateOutput:
    records, num_steps = sequences.records, sequences.final_length - sequences.prompt_length
    num_removed = [max(length - sequences.final_length, 0) for length in sequences.lengths]
    accepted_lengths = records.accepted_lengths(num_removed)
    num_cycles = max(map(len, accepted_lengths))
    return GumihoGenerateOutput(
        sequences=sequences.final_ids(),
        scores=records.scores.until(num_steps),
        logits=records.logits.until(num_steps),
        hidden_states=records.hidden_states(num_steps),
        accepted_lengths=accepted_lengths,
        draft_origins=records.draft_origins[:num_cycles],
        tree_sizes=records.tree_sizes[:num_cycles],
        **{CACHE_NAME: cache},
    )


def _drafting_settings(
    traits: TargetTraits,
    target: PreTrainedModel,
    drafter: GumihoModel,
    generation_config: GenerationConfig,
    num_rows: int,
) -> DraftingSettings:
    """Returns the settings of this call, and warns if the target takes no trees."""
    temperature = (generation_config.temperature or 1.0) if generation_config.do_sample else None
    given = {name: given_in_call(target, generation_config, name) for name in SETTINGS_OF_CALLS}
    own = overridden(drafter.generation_config, **given)
    lookup = {name: getattr(generation_config, name) for name in LOOKUP_SETTINGS}
    own.update(**{name: value for name, value in lookup.items() if value is not None})
    settings = DraftingSettings.from_generation_config(
        own, drafter.config, temperature, num_rows, input_device(target).type, traits.has_states
    )
    if not traits.is_chain:
        return settings
    if settings.branching_factor > 1:
        logger.warning_once(
            f"{traits.name} {traits.tree_obstacle}. Falling back to chain drafts (`branching_factor=1`)."
        )
    return settings.as_chain()
