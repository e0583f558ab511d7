"""Choosing the tokens that the drafter may draft: fewer make a cycle shorter, but are accepted less far.

Both are measured, with the tree that was chosen before. What a list of tokens loses is not to be seen on the text that
it was counted on, so every prompt is decoded with lists that were counted on the other half of the prompts; the list
that is kept in the end is counted on all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..model.modeling_gumiho import GumihoModel
from .acceptance import profile_acceptance
from .answers import Answer
from .contest import PLAIN, decode_in_turns
from .contexts import typical_context
from .costs import measure_cycles, smooth
from .counting import rank_on_other_half, rank_tokens
from .search import TreeSettings


# Below it there is hardly anything left to save.
SMALLEST_VOCABULARY = 256


@dataclass(frozen=True, eq=False)
class VocabularyCandidate:
    """
    Tokens that may be drafted, and what is expected of drafting them only.

    Attributes:
        token_ids: As they are written where they win; `None` for all tokens.
        of_prompts: Those that each prompt is measured with.
        size: How many there are.
        is_counted: Whether they were counted here; otherwise they are all tokens, or those the drafter came with.
        tau: Expected tokens per cycle.
        cycle_seconds: Expected time of a cycle.
    """

    token_ids: list[int] | None
    of_prompts: Sequence[list[int] | None]
    size: int
    is_counted: bool = False
    tau: float = float("nan")
    cycle_seconds: float = float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Expected speed, prompt aside."""
        return self.tau / self.cycle_seconds

    def settings(self, tree: TreeSettings) -> list[dict[str, Any]]:
        """Returns the decoding settings for each prompt, with those of `tree`."""
        return [tree.as_dict() | {"draft_vocabulary": token_ids} for token_ids in self.of_prompts]


@dataclass(frozen=True)
class VocabularyChoice:
    """
    Attributes:
        candidates: All tokens, those that the drafter came with if it did, and the most frequent ones, in ever smaller
            numbers.
        measured: Tokens per second, measured on the prompts in turns, of the candidates that competed. Empty where
            none was expected to be faster than all tokens.
        plain: Those of plain decoding in the same contest, `None` without one.
        step_seconds: Time of a step of plain decoding when cycles were timed.
    """

    candidates: list[VocabularyCandidate]
    measured: dict[VocabularyCandidate, float]
    plain: float | None
    step_seconds: float

    @property
    def whole(self) -> VocabularyCandidate:
        """All tokens."""
        return self.candidates[0]

    @property
    def chosen(self) -> VocabularyCandidate:
        """The candidate that was measured to be fastest."""
        return max(self.measured, key=lambda candidate: self.measured[candidate]) if self.measured else self.whole

    def expected_speed(self, candidate: VocabularyCandidate) -> float:
        """
        Returns the tokens per second to expect of `candidate` while plain decoding is as fast as in the contest, if
        there was one; see [`TuningResult.expected_speed`].
        """
        return candidate.tokens_per_second * (1 if self.plain is None else self.step_seconds * self.plain)


@torch.inference_mode()
def choose_vocabulary(
    target: PreTrainedModel,
    drafter: GumihoModel,
    prompts: Sequence[torch.Tensor],
    answers: Sequence[Answer],
    tree: TreeSettings,
    max_new_tokens: int,
    repeats: int = 3,
    **generate_kwargs: Any,
) -> VocabularyChoice | None:
    """
    Measures how far drafts are accepted and what cycles cost with fewer and fewer tokens to draft, and lets the number
    that should be fastest decode the prompts in turns with all tokens and with those that the drafter came with.

    Args:
        target: The target.
        drafter: The drafter. Its settings are as before afterwards.
        prompts: Token ids `(T,)` of each prompt.
        answers: What the target answered to each.
        tree: The tree to draft.
        max_new_tokens: Tokens to generate for each prompt.
        repeats: A third of the times that cycles are timed, of which the median counts: vocabularies make less of a
            difference than trees do.
        **generate_kwargs: For `generate()`.

    Returns:
        What was found; `None` where there is nothing to choose from, because the vocabulary is small already or one
        prompt leaves none to count on.
    """
    candidates = list_candidates(drafter, answers)
    if len(candidates) == 1:
        return None
    seconds, step_seconds = _cycle_seconds(
        target, drafter, answers, candidates, tree, max_new_tokens, repeats, **generate_kwargs
    )
    expected = []
    for candidate in tqdm(candidates, desc="measuring draft vocabularies", unit="vocabulary"):
        profile = profile_acceptance(
            target, drafter, prompts, max_new_tokens, candidate.settings(tree), **generate_kwargs
        )
        tau = profile.tau(tree.num_assistant_tokens, tree.tree_depth)
        expected.append(replace(candidate, tau=tau, cycle_seconds=seconds[candidate.size]))
    contenders = choose_vocabulary_contenders(expected)
    if len(contenders) == 1:
        return VocabularyChoice(expected, {}, None, step_seconds)
    ways = {candidate: candidate.settings(tree) for candidate in contenders}
    speeds = decode_in_turns(target, drafter, prompts, ways, max_new_tokens, **generate_kwargs)
    measured = {candidate: speeds[candidate] for candidate in contenders}
    return VocabularyChoice(expected, measured, speeds[PLAIN], step_seconds)


def list_candidates(drafter: GumihoModel, answers: Sequence[Answer]) -> list[VocabularyCandidate]:
    """Returns what to compare, in the order of [`VocabularyChoice`], without what is expected of it."""
    vocab_size = drafter.config.get_text_config().vocab_size
    found = [VocabularyCandidate(None, [None] * len(answers), vocab_size)]
    given = drafter.generation_config.draft_vocabulary
    if given is not None:
        found.append(VocabularyCandidate(list(given), [list(given)] * len(answers), len(given)))
    if len(answers) > 1:
        ranked, of_prompts = rank_tokens(answers, vocab_size), rank_on_other_half(answers, vocab_size)
        size = vocab_size // 2
        while size >= SMALLEST_VOCABULARY:
            parts = [ranking[:size] for ranking in of_prompts]
            found.append(VocabularyCandidate(ranked[:size], parts, size, is_counted=True))
            size //= 2
    return found


def choose_vocabulary_contenders(candidates: Sequence[VocabularyCandidate]) -> list[VocabularyCandidate]:
    """
    Returns those that are to compete: all tokens, what the drafter came with, and of the counted ones that which
    should be fastest, if it should be faster than all tokens.
    """
    whole = candidates[0]
    given = [candidate for candidate in candidates if not candidate.is_counted]
    counted = [candidate for candidate in candidates if candidate.is_counted]
    best = max(counted, key=lambda candidate: candidate.tokens_per_second, default=whole)
    return [*given, best] if best.tokens_per_second > whole.tokens_per_second else given


def _cycle_seconds(
    target: PreTrainedModel,
    drafter: GumihoModel,
    answers: Sequence[Answer],
    candidates: Sequence[VocabularyCandidate],
    tree: TreeSettings,
    max_new_tokens: int,
    repeats: int,
    **generate_kwargs: Any,
) -> tuple[dict[int, float], float]:
    """
    Returns what a cycle costs with each number of tokens, and what a step of plain decoding does. A generation copies
    their rows of the head once, so whole generations are timed: each cycle bears its part of that.
    """
    # Which tokens they are makes no difference to the time.
    by_size: dict[int, dict[str, Any]] = {}
    for candidate in candidates:
        by_size.setdefault(candidate.size, tree.as_dict() | {"draft_vocabulary": candidate.token_ids})
    context = typical_context(answers, max_new_tokens)
    increasing = dict(sorted(by_size.items()))
    seconds, step_seconds = measure_cycles(
        target, drafter, context, increasing, max_new_tokens, 3 * repeats, **generate_kwargs
    )
    # More tokens cost no less. Where all of them do, the head cannot be cut to rows, and no list saves anything.
    return smooth(seconds), step_seconds
