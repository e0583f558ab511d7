"""The generation loop: draft a tree, verify it in one pass of the target, commit what the target agrees with."""

import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from ..drafting.candidate_generator import GumihoCandidateGenerator
from ..drafting.settings import DraftingSettings
from ..model.modeling_gumiho import GumihoModel
from ..target.cycle_shapes import cycle_shapes
from ..target.output_head import drafting_head, output_head
from ..target.requirements import check_cache, check_positions
from ..target.runner import TargetOutput, TargetRunner
from ..target.tree_cache import TreeCache
from ..tree.draft_tree import DraftTree, bare_root
from .observers import GenerationEvents
from .sequences import CommittedSequences
from .step_records import HiddenStateRecord
from .token_choice import TokenChooser, pick


@dataclass
class GumihoGenerateOutput(GenerateDecoderOnlyOutput):
    """
    What `generate(assistant_model=<GumihoModel>, return_dict_in_generate=True)` returns.

    Args:
        accepted_lengths (`list[list[int]]`):
            For each row, the tokens committed by each verification cycle: accepted drafts and the bonus token. Their
            mean is the acceptance length tau. The first token comes from the prompt pass and counts in no cycle.

    In a batch, `scores`, `logits` and `hidden_states` are zero where a row has ended before the others: the target is
    not run on padding.
    """

    accepted_lengths: list[list[int]] | None = None


def decode_with_tree(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: GumihoModel,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> GumihoGenerateOutput | torch.Tensor:
    """
    Decodes with a Gumiho drafter. Called by `generate()`, with what it prepared.

    Returns:
        `(B, T + new)` token ids, or a [`GumihoGenerateOutput`] with `return_dict_in_generate=True`.
    """
    settings = DraftingSettings.from_generation_config(
        assistant_model.generation_config,
        assistant_model.config,
        sampling_temperature=(generation_config.temperature or 1.0) if generation_config.do_sample else None,
    )
    batch_size = input_ids.shape[0]
    sequences = CommittedSequences(input_ids, stopping_criteria, generation_config, streamer)
    max_new_tokens = sequences.max_length - sequences.prompt_length
    check_positions(target, model_kwargs["position_ids"], max_new_tokens)
    num_nodes = settings.num_assistant_tokens + 1
    shapes = cycle_shapes(target, generation_config, model_kwargs, num_nodes)
    if shapes.are_fixed:
        # The prompt goes through an ordinary cache. The static one that `generate()` prepared is dropped; unless the
        # prompt is read in chunks it has taken no memory yet.
        model_kwargs["past_key_values"] = DynamicCache(config=target.config.get_text_config(decoder=True))
    check_cache(model_kwargs.get("past_key_values"))
    chooser = TokenChooser(sequences, logits_processor, stopping_criteria, generation_config, shapes)
    returns_states = generation_config.return_dict_in_generate and generation_config.output_hidden_states
    layers = HiddenStateRecord(batch_size, bool(returns_states))
    accepted_lengths: list[list[int]] = [[] for _ in range(batch_size)]
    events = GenerationEvents.begin(batch_size)

    with TargetRunner(target, generation_config, model_kwargs, num_nodes, shapes) as runner:
        with events.stage("prompt"):
            output = runner.read_prompt(input_ids, max_new_tokens)
        layers.add_prompt(output.hidden_states)
        chooser.commit(bare_root(input_ids.new_zeros(batch_size)), output.logits)
        sequences.stream()
        if not sequences.finished:
            generator = _make_generator(target, assistant_model, settings, runner, output, events)
            noise = chooser.peek_noise(settings.tree_depth)
            with events.stage("draft"):
                tree = _draft_after_prompt(generator, sequences, runner, output, noise)
        while not sequences.finished:
            with events.stage("verify"):
                output = runner.run_tree(tree)
            nodes, kept = chooser.commit(tree, output.logits)
            events.cycle(tree, nodes, kept, sequences)
            sequences.stream()
            runner.commit(kept, nodes)
            layers.add(output.hidden_states, nodes, kept)
            for lengths, number in zip(accepted_lengths, kept, strict=True):
                lengths.extend([number] if number else [])
            if not sequences.finished:
                noise = chooser.peek_noise(settings.tree_depth)
                with events.stage("draft"):
                    tree = _draft_after_cycle(generator, nodes, kept, sequences, output, noise)
        num_removed = [max(length - sequences.final_length, 0) for length in sequences.lengths]
        runner.truncate(num_removed)

    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return sequences.final_ids()
    num_steps = sequences.final_length - sequences.prompt_length
    return GumihoGenerateOutput(
        sequences=sequences.final_ids(),
        scores=chooser.scores.until(num_steps),
        logits=chooser.logits.until(num_steps),
        hidden_states=layers.until(num_steps),
        past_key_values=runner.prompt_cache,
        accepted_lengths=[_without_last(*row) for row in zip(accepted_lengths, num_removed, strict=True)],
    )


def _without_last(lengths: list[int], num_tokens: int) -> list[int]:
    """Takes the last `num_tokens` tokens out of the lengths of the cycles that committed them."""
    kept = list(itertools.accumulate(lengths))
    total = (kept[-1] if kept else 0) - num_tokens
    return [length - max(end - total, 0) for length, end in zip(lengths, kept, strict=True) if end - length < total]


def _make_generator(
    target: PreTrainedModel,
    assistant: GumihoModel,
    settings: DraftingSettings,
    runner: TargetRunner,
    prompt: TargetOutput,
    events: GenerationEvents,
) -> GumihoCandidateGenerator:
    # Not the states themselves: the drafter would keep those of the whole prompt.
    device, dtype = prompt.last_hidden_state.device, prompt.last_hidden_state.dtype
    batch_size, num_read = prompt.last_hidden_state.shape[:2]
    # Behind the committed tokens there are those of a cycle, and then the candidates of the later serial steps.
    num_new = max(settings.tree_depth + 1, settings.branching_factor * (assistant.config.num_serial_tokens - 1))
    capacity = num_read + runner.cache.capacity - runner.prompt_length + num_new
    head, token_ids = output_head(target), None
    if settings.draft_vocabulary is not None:
        token_ids = torch.tensor(settings.draft_vocabulary, device=device)
        head = drafting_head(target, token_ids)
    return GumihoCandidateGenerator(
        assistant,
        lm_head=lambda features: head(features.to(device=device, dtype=dtype)),
        settings=settings,
        past_key_values=TreeCache(batch_size, capacity),
        shapes=runner.shapes,
        token_ids=token_ids,
        # Within a compiled function nobody could be told.
        around_pass=nullcontext if runner.shapes.are_compiled else events.each("drafter_pass"),
    )


def _draft_after_prompt(
    generator: GumihoCandidateGenerator,
    sequences: CommittedSequences,
    runner: TargetRunner,
    output: TargetOutput,
    noise: torch.Tensor | None,
) -> DraftTree:
    """Drafts the first tree. With a cache of the caller's, the drafter knows the part of the text that was run."""
    # With `inputs_embeds` the tokens of the prompt are not known, and only the generated ones are.
    num_known = min(output.last_hidden_state.shape[1], sequences.lengths[0])
    mask = runner.prompt_mask
    counts = [num_known] * len(sequences.lengths)
    # A multimodal prompt may mark its images by ids outside the vocabulary; the states tell what is there.
    vocab_size = generator.assistant_model.config.get_text_config().vocab_size
    return generator.get_tree(
        sequences.newest(counts).clamp(0, vocab_size - 1),
        output.last_hidden_state[:, -num_known:],
        output.position_ids[:, -num_known:],
        counts,
        mask[:, -num_known:] if mask is not None else None,
        noise,
    )


def _draft_after_cycle(
    generator: GumihoCandidateGenerator,
    nodes: torch.Tensor,
    kept: list[int],
    sequences: CommittedSequences,
    output: TargetOutput,
    noise: torch.Tensor | None,
) -> DraftTree:
    """Drafts the next tree from the states of the nodes that were kept."""
    states = output.last_hidden_state
    if not generator.drafter.has_fixed_shapes:
        nodes = nodes[:, : max(kept)]
    return generator.get_tree(
        sequences.newest(kept, nodes.shape[1]),
        pick(states, nodes),
        output.position_ids.gather(1, nodes.to(output.position_ids.device)),
        kept,
        noise=noise,
    )
