"""The generation loop: draft a tree, verify it in one pass of the target, commit the accepted path."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..drafting.candidate_generator import GumihoCandidateGenerator
from ..internals import CACHE_NAME
from ..model.decoding_settings import DraftingSettings
from ..model.modeling_gumiho import GumihoModel
from ..tree.draft_tree import DraftTree, bare_root
from ..tree.walk import AcceptedPath
from ..verification.continuation import check_multi_token_decode
from ..verification.cycle_shapes import CycleShapes, cycle_shapes
from ..verification.placement import input_device
from ..verification.prompt import outlives_call, prompt_positions, read_prompt
from ..verification.requirements import check_cache, check_padding, check_positions, check_text_is_kept
from ..verification.traits import TargetTraits
from .observers import GenerationEvents
from .sequences import CommittedSequences, max_length_of
from .token_choice import TokenChooser


logger = logging.get_logger(__name__)


@dataclass
class GumihoGenerateOutput(GenerateDecoderOnlyOutput):
    """
    Output of `generate(assistant_model=<GumihoModel>, return_dict_in_generate=True)`.

    Args:
        accepted_lengths (`list[list[int]]`):
            For each row, the tokens committed by each verification cycle: accepted drafts and the bonus token. Their
            mean is the acceptance length tau. The first token comes from the prefill and counts in no cycle. A sampled
            row that is far ahead of the others takes one token per cycle.
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
    **model_kwargs: Any,
) -> GumihoGenerateOutput | torch.Tensor:
    """
    Decodes with a Gumiho drafter. Called by `generate()`, with what it prepared, and with the target's traits.

    Returns:
        `(B, T + new)` token ids, or a [`GumihoGenerateOutput`] with `return_dict_in_generate=True`.
    """
    num_rows = len(input_ids)
    settings = _drafting_settings(traits, target, assistant_model, generation_config, num_rows)
    sequences = CommittedSequences(input_ids, stopping_criteria, generation_config, streamer)
    keeps_cache = outlives_call(model_kwargs.get(traits.cache_argument), traits, generation_config)
    num_nodes = settings.num_assistant_tokens + 1
    shapes = _prepare_shapes(target, traits, generation_config, model_kwargs, num_nodes)
    is_chain = traits.is_chain
    chooser = TokenChooser(sequences, logits_processor, stopping_criteria, generation_config, shapes, is_chain)
    events = GenerationEvents.begin(num_rows)

    def commit(tree: DraftTree, logits: torch.Tensor) -> AcceptedPath:
        # One part, or a part for each token where processors, criteria or the streamer need the text before it.
        return AcceptedPath.join([sequences.commit(walked) for walked in chooser.walk(tree, logits)])

    with ExitStack() as running:
        running.callback(chooser.return_unused_draws)
        with events.stage("prompt"):
            session, output = read_prompt(
                target,
                traits,
                input_ids,
                generation_config,
                model_kwargs,
                shapes,
                keeps_cache=keeps_cache,
                max_new_tokens=sequences.max_length - sequences.prompt_length,
                num_nodes=num_nodes,
                max_path=settings.longest_path + 1,
                layers=assistant_model.config.layers_read(target.config),
            )
            # Entered first, because it must return the entries of the caller's cache if an observer raises an error.
            running.enter_context(session)
        # The prefill is a pass over a tree, too: a root alone, the prompt's end, whose token does not matter.
        tree = bare_root(input_ids.new_zeros(num_rows))
        sequences.records.add_prompt(output.hidden_states)
        commit(tree, output.logits)
        if not sequences.finished:
            drafts = GumihoCandidateGenerator.after_prompt(
                session,
                assistant_model,
                settings,
                output.states,
                read_text=sequences.tokens_from,
                prompt_length=sequences.prompt_length,
                peek_noise=chooser.peek_noise,
                around_pass=events.each("drafter_pass"),
                prompt_chunk_size=generation_config.prefill_chunk_size,
            )
            vocab_size = assistant_model.config.get_text_config().vocab_size
            committed = session.committed_prompt(sequences.prefix(sequences.lengths[0]), output, vocab_size)
        while not sequences.finished:
            # 1. Draft a tree after the committed tokens.
            with events.stage("draft"):
                tree = drafts.draft_tree(committed, sequences.num_missing)
            events.tree(drafts.origin)
            # 2. Verify all of its nodes in one pass of the target.
            with events.stage("verify"):
                output = session.run_tree(tree, [not is_open for is_open in sequences.open_rows])
            # 3. Commit the drafts that are the target's own tokens, and the target's token after them.
            path = commit(tree, output.logits)
            events.cycle(tree, path)
            sequences.records.add_cycle(tree, path, output.hidden_states)
            # 4. Roll the cache back to the accepted path.
            committed = session.keep(path, output)
        session.finish(sequences.num_cached_by_plain_decoding(), sequences.newest(1).squeeze(1), tree)

    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return sequences.final_ids()
    return _output(sequences, session.prompt.cache)


def _output(sequences: CommittedSequences, cache: Any) -> GumihoGenerateOutput:
    records, num_steps = sequences.records, sequences.final_length - sequences.prompt_length
    num_removed = [max(length - sequences.final_length, 0) for length in sequences.lengths]
    accepted_lengths = records.accepted_lengths(num_removed)
    return GumihoGenerateOutput(
        sequences=sequences.final_ids(),
        scores=records.scores.until(num_steps),
        logits=records.logits.until(num_steps),
        hidden_states=records.hidden_states(num_steps),
        accepted_lengths=accepted_lengths,
        tree_sizes=records.tree_sizes[: max(map(len, accepted_lengths))],
        **{CACHE_NAME: cache},
    )


def check_inputs(
    target: PreTrainedModel, traits: TargetTraits, input_ids: torch.Tensor, arguments: dict[str, Any]
) -> None:
    """
    Raises [`Unsupported`] where drafts cannot be verified for these inputs. The target does not run, except for a
    trial of a few tokens in the first call of a chain's class and config.

    Args:
        target: A decoder-only model.
        traits: Its traits.
        input_ids (`(B, T)`): The prompt.
        arguments: What `generate()` hands to its decoding loop, the cache among them.
    """
    config: GenerationConfig = arguments["generation_config"]
    check_padding(traits, arguments)
    max_new_tokens = max_length_of(arguments["stopping_criteria"], config) - input_ids.shape[1]
    check_positions(traits, prompt_positions(input_ids, arguments), max_new_tokens)
    cache = arguments.get(traits.cache_argument)
    if config.cache_implementation != "static":  # a static cache is replaced by one of ours
        check_cache(traits, cache)
        check_text_is_kept(target, traits, cache, input_ids.shape[1], max_new_tokens)
    if traits.is_chain:
        check_multi_token_decode(target, traits, arguments.get("attention_mask"), len(input_ids))


def _drafting_settings(
    traits: TargetTraits,
    target: PreTrainedModel,
    drafter: GumihoModel,
    generation_config: GenerationConfig,
    num_rows: int,
) -> DraftingSettings:
    """Returns the settings of this call, and warns if the target takes no trees."""
    temperature = (generation_config.temperature or 1.0) if generation_config.do_sample else None
    settings = DraftingSettings.from_generation_config(
        drafter.generation_config, drafter.config, temperature, num_rows, input_device(target).type
    ).with_prompt_lookup(generation_config)
    if not traits.is_chain:
        return settings
    if settings.branching_factor > 1:
        logger.warning_once(
            f"{traits.name} {traits.tree_obstacle}. Falling back to chain drafts (`branching_factor=1`)."
        )
    return settings.as_chain()


def _prepare_shapes(
    target: PreTrainedModel,
    traits: TargetTraits,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    num_nodes: int,
) -> CycleShapes:
    """Returns the shapes of the cycles, and gives the prefill an ordinary cache."""
    shapes = cycle_shapes(target, generation_config, model_kwargs, num_nodes)
    if shapes.are_fixed:
        # The static cache that `generate()` prepared is dropped; unless the prompt is read in chunks it has taken no
        # memory yet.
        model_kwargs[CACHE_NAME] = traits.make_cache()
    elif model_kwargs.get(traits.cache_argument) is None:
        # `generate()` leaves a cache of the target's own class to the prompt's pass.
        model_kwargs[traits.cache_argument] = traits.make_cache()
    return shapes
