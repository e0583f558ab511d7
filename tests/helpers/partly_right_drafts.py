"""Drafts that are accepted in part, for targets whose text is known: what a trained drafter would do, without one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from transformers_gumiho.generation.drafting.drafter import GumihoDrafter
from transformers_gumiho.generation.tree.draft_tree import DraftTree
from transformers_gumiho.generation.verification.session import CommittedTokens


@contextmanager
def partly_right_drafts(
    answers: torch.Tensor, prompt_length: int, vocab_size: int, wrong_every: int | None = 12
) -> Iterator[None]:
    """
    Within it the longest path of each draft tree holds the target's own tokens, some of which are made wrong. The
    other nodes stay what the drafter made of them.

    Args:
        answers (`(B, T)`): Prompts of `prompt_length` tokens, and what the target goes on with.
        prompt_length: Tokens of the prompts, padding included.
        vocab_size: The target's.
        wrong_every: One token in so many is wrong; `None` for none of them.
    """
    draft = GumihoDrafter.draft
    GumihoDrafter.draft = _answering(draft, answers, prompt_length, vocab_size, wrong_every)
    try:
        yield
    finally:
        GumihoDrafter.draft = draft


def _answering(
    draft: Callable[..., DraftTree],
    answers: torch.Tensor,
    prompt_length: int,
    vocab_size: int,
    wrong_every: int | None,
) -> Callable[..., DraftTree]:
    lengths: dict[int, list[int]] = {}  # of the texts, by generator

    def draft_tree(self: GumihoDrafter, committed: CommittedTokens) -> DraftTree:
        tree = draft(self, committed)
        if id(self) in lengths:
            now = [a + b for a, b in zip(lengths[id(self)], committed.accepted_lengths, strict=True)]
        else:
            # In the first call the committed tokens are those of the prompt, moved on by one.
            now = [prompt_length + 1] * len(committed.accepted_lengths)
        lengths[id(self)] = now
        tokens = tree.tokens.clone()
        for row, length in enumerate(now):
            for depth, node in enumerate(_longest_path(tree, row)):
                place = min(length + depth, answers.shape[1] - 1)
                is_wrong = wrong_every is not None and (7 * place + row) % wrong_every == 0
                _place(tokens[row], tree.parents[row], node, int(answers[row, place] + is_wrong) % vocab_size)
        return replace(tree, tokens=tokens)

    return draft_tree


def _longest_path(tree: DraftTree, row: int) -> list[int]:
    """Returns the nodes below the root, from the top."""
    deepest = tree.depths[row].argmax()
    path: list[int] = tree.ancestors[row, deepest].nonzero().flatten().tolist()
    return path[1:]


def _place(tokens: torch.Tensor, parents: torch.Tensor, node: int, token: int) -> None:
    """Gives `node` the token `token`, and a sibling that has it the token of `node`: siblings differ."""
    siblings = (parents == parents[node]) & (tokens == token)
    siblings[0] = False
    tokens[siblings] = tokens[node].clone()
    tokens[node] = token
