"""The generation loop: draft a tree, verify it in one pass of the target, commit what the target agrees with."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMixin,
    GenerationMode,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.streamers import BaseStreamer

from .cache import TreeCache
from .candidate_generator import GumihoCandidateGenerator
from .compatibility import check_cache, check_positions, check_request
from .drafting import DraftingSettings
from .modeling_gumiho import GumihoModel
from .sequences import CommittedSequences, HiddenStateRecord, StepRecord
from .target import TargetOutput, TargetRunner
from .tree import DraftTree, bare_root
from .verification import find_child, walk_tree


# What `generate()` sets up at greedy that looks at nothing but the scores: applied to all nodes of a tree at once.
_PREFIX_FREE_PROCESSORS = (InfNanRemoveLogitsProcessor, LogitNormalization, SuppressTokensLogitsProcessor)


@dataclass
class GumihoGenerateOutput(GenerateDecoderOnlyOutput):
    """
    What `generate(assistant_model=<GumihoModel>, return_dict_in_generate=True)` returns.

    Args:
        accepted_lengths (`list[list[int]]`):
            For each row, the tokens committed by each verification cycle: accepted drafts and the bonus token. Their
            mean is the acceptance length tau. The first token comes from the prompt pass and counts in no cycle.
    """

    accepted_lengths: list[list[int]] | None = None


class TokenChooser:
    """
    Chooses the target's next tokens along a draft tree, exactly as plain decoding chooses them, and commits them.

    Args:
        sequences: The committed text.
        logits_processor: As prepared by `generate()`.
        generation_config: As prepared by `generate()`.
    """

    def __init__(
        self,
        sequences: CommittedSequences,
        logits_processor: LogitsProcessorList,
        generation_config: GenerationConfig,
    ):
        self.sequences = sequences
        self.logits_processor = logits_processor
        self.do_sample = generation_config.do_sample
        self.batch_size = len(sequences.lengths)
        returns_dict = generation_config.return_dict_in_generate
        self.scores = StepRecord(self.batch_size, bool(returns_dict and generation_config.output_scores))
        self.logits = StepRecord(self.batch_size, bool(returns_dict and generation_config.output_logits))
        self.whole_tree = not self.do_sample and all(
            type(processor) in _PREFIX_FREE_PROCESSORS for processor in logits_processor
        )

    def commit(self, tree: DraftTree, logits: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """
        Walks `tree` by the target's `logits` `(B, N + 1, V)` and commits the chosen tokens.

        Returns:
            The visited nodes `(B, L)`, and the number of tokens committed in each row, one per visited node.
        """
        logits = logits.to(dtype=torch.float32, device=tree.tokens.device)
        nodes, kept = self._commit_whole_tree(tree, logits) if self.whole_tree else self._commit_stepwise(tree, logits)
        num_generated = [length - self.sequences.prompt_length for length in self.sequences.lengths]
        self.scores.trim(num_generated)
        self.logits.trim(num_generated)
        return nodes, kept

    def _commit_whole_tree(self, tree: DraftTree, logits: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Greedy, with processors that do not depend on the prefix: one walk on the device, one synchronisation."""
        scores = logits
        if len(self.logits_processor) > 0:
            flat = logits.flatten(0, 1).clone()
            scores = self.logits_processor(self.sequences.prefix(1).expand(flat.shape[0], -1), flat).view_as(logits)
        path = walk_tree(tree, scores.argmax(dim=-1))
        host = torch.cat((path.counts[:, None], path.tokens), dim=1).tolist()
        counts = [row[0] for row in host]
        self._record(self.logits, logits, path.nodes, counts)
        self._record(self.scores, scores, path.nodes, counts)
        return path.nodes, self.sequences.commit(path.tokens, [row[1:] for row in host], counts, self.scores)

    def _commit_stepwise(self, tree: DraftTree, logits: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """One token after the other, as plain decoding: the processors see each node's true prefix, once."""
        node = tree.parents[:, 0]
        visited: list[torch.Tensor] = []
        kept = [0] * self.batch_size
        walking = [self.sequences.is_open(row) for row in range(self.batch_size)]
        while any(walking):
            visited.append(node)
            node_logits = logits.gather(1, node[:, None, None].expand(-1, -1, logits.shape[2])).squeeze(1)
            scores = self._process(node_logits, walking)
            if self.do_sample:
                tokens = torch.multinomial(scores.softmax(dim=-1), num_samples=1)
            else:
                tokens = scores.argmax(dim=-1, keepdim=True)
            node, found = find_child(tree, node, tokens.squeeze(1))
            host = torch.cat((tokens, found[:, None]), dim=1).tolist()
            counts = [int(is_walking) for is_walking in walking]
            self.logits.add(node_logits[:, None], counts)
            self.scores.add(scores[:, None], counts)
            new = self.sequences.commit(tokens, [row[:1] for row in host], counts, self.scores)
            kept = [total + number for total, number in zip(kept, new, strict=True)]
            walking = [
                is_walking and bool(host[row][1]) and self.sequences.is_open(row)
                for row, is_walking in enumerate(walking)
            ]
        return torch.stack(visited, dim=1), kept

    def _process(self, logits: torch.Tensor, walking: list[bool]) -> torch.Tensor:
        """
        Returns the processed scores `(B, V)` of each walking row's next token.

        Processors take rows of one length, so rows of different lengths take one call for each length; what such a
        call returns for the other rows is left unused.
        """
        lengths = self.sequences.lengths
        processed: torch.Tensor | None = None
        for length in sorted({length for length, is_walking in zip(lengths, walking, strict=True) if is_walking}):
            scores = self.logits_processor(self.sequences.prefix(length), logits.clone())
            if processed is None:
                processed = scores
                continue
            rows = [row for row, row_length in enumerate(lengths) if row_length == length]
            processed[rows] = scores[rows]
        if processed is None:
            raise RuntimeError("No row takes another token.")
        return processed

    def _record(self, record: StepRecord, values: torch.Tensor, nodes: torch.Tensor, counts: list[int]) -> None:
        if record.enabled:
            nodes = nodes[:, : max(counts)]
            record.add(values.gather(1, nodes[:, :, None].expand(-1, -1, values.shape[2])), counts)


def _validate_generation_mode(
    plain: Callable[..., None],
    target: PreTrainedModel,
    generation_mode: GenerationMode,
    generation_config: GenerationConfig,
    generation_mode_kwargs: dict[str, Any],
) -> None:
    """Checks a call of `generate()`; `plain` does so for every other assistant."""
    assistant = generation_mode_kwargs.get("assistant_model")
    if isinstance(assistant, GumihoModel):
        check_request(target, assistant, generation_mode, generation_config, generation_mode_kwargs)
        # What is left to check is what the target would refuse without an assistant, too.
        generation_mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
        generation_mode_kwargs = {name: v for name, v in generation_mode_kwargs.items() if name != "assistant_model"}
    plain(generation_mode, generation_config, generation_mode_kwargs)


def _assisted_decoding(
    plain: Callable[..., Any], target: PreTrainedModel, input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Decodes with an assistant; `plain` does so with every other one."""
    if not isinstance(kwargs.get("assistant_model"), GumihoModel):
        return plain(input_ids, *args, **kwargs)
    for name in ("inputs_tensor", "tokenizer", "assistant_tokenizer"):
        kwargs.pop(name, None)
    return decode_with_tree(target, input_ids, *args, **kwargs)


_DISPATCHERS: dict[str, Callable[..., Any]] = {
    "_validate_generation_mode": _validate_generation_mode,
    "_assisted_decoding": _assisted_decoding,
}


class GumihoGenerationMixin(GenerationMixin):
    """
    `generate()` with draft trees, for classes that replace transformers' decoding methods by their own.

    Stock classes need not inherit from this: `import transformers_gumiho` gives the same to all of them.
    """

    @functools.wraps(GenerationMixin._validate_generation_mode)
    def _validate_generation_mode(self, *args: Any, **kwargs: Any) -> None:
        _validate_generation_mode(super()._validate_generation_mode, self, *args, **kwargs)

    @functools.wraps(GenerationMixin._assisted_decoding)
    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        return _assisted_decoding(super()._assisted_decoding, self, *args, **kwargs)


def install() -> None:
    """
    Makes every generating class of transformers dispatch on a Gumiho assistant. Every other call takes transformers'
    own path. Calling this again changes nothing.
    """
    for name, dispatcher in _DISPATCHERS.items():
        plain = getattr(GenerationMixin, name)
        if not hasattr(plain, "_dispatches_to_gumiho"):
            setattr(GenerationMixin, name, _dispatching(plain, dispatcher))


def _dispatching(plain: Callable[..., Any], dispatcher: Callable[..., Any]) -> Callable[..., Any]:
    # `generate()` reads the signature of the method it calls; `wraps` passes the original's on.
    @functools.wraps(plain)
    def method(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return dispatcher(functools.partial(plain, self), self, *args, **kwargs)

    method._dispatches_to_gumiho = True  # type: ignore[attr-defined]
    return method


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
    check_cache(model_kwargs.get("past_key_values"))
    check_positions(target, input_ids.shape[1], generation_config.max_length)
    settings = DraftingSettings.from_generation_config(
        assistant_model.generation_config,
        assistant_model.config,
        sampling_temperature=(generation_config.temperature or 1.0) if generation_config.do_sample else None,
    )
    batch_size = input_ids.shape[0]
    sequences = CommittedSequences(input_ids, stopping_criteria, generation_config, streamer)
    chooser = TokenChooser(sequences, logits_processor, generation_config)
    layers = HiddenStateRecord(
        batch_size, bool(generation_config.return_dict_in_generate and generation_config.output_hidden_states)
    )
    accepted_lengths: list[list[int]] = [[] for _ in range(batch_size)]

    with TargetRunner(target, generation_config, model_kwargs, settings.num_assistant_tokens + 1) as runner:
        output = runner.read_prompt(input_ids, generation_config.max_length - sequences.prompt_length)
        layers.add_prompt(output.hidden_states)
        chooser.commit(bare_root(input_ids.new_zeros(batch_size)), output.logits)
        sequences.stream()
        if not sequences.finished:
            generator = _make_generator(target, assistant_model, settings, runner, output)
            tree = _draft_after_prompt(generator, sequences, runner, output)
        while not sequences.finished:
            output = runner.run_tree(tree)
            nodes, kept = chooser.commit(tree, output.logits)
            sequences.stream()
            runner.commit(kept, nodes)
            layers.add(output.hidden_states, nodes, kept)
            for lengths, number in zip(accepted_lengths, kept, strict=True):
                lengths.extend([number] if number else [])
            if not sequences.finished:
                tree = _draft_after_cycle(generator, nodes, kept, sequences, output)
        runner.truncate([max(length - sequences.final_length, 0) for length in sequences.lengths])

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
        accepted_lengths=accepted_lengths,
    )


def _make_generator(
    target: PreTrainedModel,
    assistant: GumihoModel,
    settings: DraftingSettings,
    runner: TargetRunner,
    prompt: TargetOutput,
) -> GumihoCandidateGenerator:
    head, like = target.get_output_embeddings(), prompt.last_hidden_state
    batch_size, num_read = like.shape[:2]
    capacity = num_read + runner.cache.capacity - runner.prompt_length + settings.branching_factor
    return GumihoCandidateGenerator(
        assistant,
        lm_head=lambda features: head(features.to(device=like.device, dtype=like.dtype)),
        settings=settings,
        past_key_values=TreeCache(batch_size, capacity),
    )


def _draft_after_prompt(
    generator: GumihoCandidateGenerator, sequences: CommittedSequences, runner: TargetRunner, output: TargetOutput
) -> DraftTree:
    """Drafts the first tree. With a cache of the caller's, the drafter knows the part of the text that was run."""
    # With `inputs_embeds` the tokens of the prompt are not known, and only the generated ones are.
    num_known = min(output.last_hidden_state.shape[1], sequences.lengths[0])
    mask = runner.prompt_mask
    counts = [num_known] * len(sequences.lengths)
    return generator.get_tree(
        sequences.newest(counts),
        output.last_hidden_state[:, -num_known:],
        output.position_ids[:, -num_known:],
        counts,
        mask[:, -num_known:] if mask is not None else None,
    )


def _draft_after_cycle(
    generator: GumihoCandidateGenerator,
    nodes: torch.Tensor,
    kept: list[int],
    sequences: CommittedSequences,
    output: TargetOutput,
) -> DraftTree:
    """Drafts the next tree from the states of the nodes that were kept."""
    states = output.last_hidden_state
    nodes = nodes[:, : max(kept)].to(states.device)
    return generator.get_tree(
        sequences.newest(kept),
        states.gather(1, nodes[:, :, None].expand(-1, -1, states.shape[2])),
        output.position_ids.gather(1, nodes.to(output.position_ids.device)),
        kept,
    )
