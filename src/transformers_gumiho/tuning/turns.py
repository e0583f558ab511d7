"""Decoding the prompts of a turn, with a tree or plainly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..measuring.prompts import pad_left
from ..measuring.timing import DecodingTime, time_drafted, time_plain
from ..model.decoding_settings import NEVER_PAUSES
from ..model.modeling_gumiho import GumihoModel
from ..verification.placement import input_device
from .contest import PLAIN
from .trees import Tree


@dataclass(frozen=True)
class Contest:
    """
    Prompts that are decoded in turns.

    Attributes:
        name: Unique among stages with the same rows and temperature.
        prompts: Token ids of each prompt.
        rows: Number of prompts in a turn, which are decoded as a batch.
        temperature: 0 is greedy.
        counted: Token ids that trees with the vocabulary "counted" may draft.
        drafter_alone: Leave out prompt lookup, even if the drafter's settings ask for it.
    """

    name: str
    prompts: Sequence[Sequence[int]]
    rows: int
    temperature: float
    counted: Sequence[int] = ()
    drafter_alone: bool = False

    def indices(self, turn: int) -> list[int]:
        """Returns the indices of the prompts of a turn. After the last prompt follows the first one."""
        return [(turn * self.rows + row) % len(self.prompts) for row in range(self.rows)]


# Decodes a turn of a contest with a tree, or plainly.
Decode = Callable[[Contest, Tree | None, int], DecodingTime]


class TurnDecoder:
    """
    Decodes turns and times them. Before its first turn, each way of decoding runs once to warm up.

    Args:
        target: The target.
        drafter: The drafter. Its settings are restored after each turn.
        pad_token_id: Pads shorter prompts of a batch.
        max_new_tokens: Tokens to generate for each prompt.
    """

    def __init__(self, target: PreTrainedModel, drafter: GumihoModel, pad_token_id: int | None, max_new_tokens: int):
        self._target = target
        self._drafter = drafter
        self._pad_token_id = pad_token_id
        self._max_new_tokens = max_new_tokens
        self._warm: set[tuple[Tree | None, int, float]] = set()

    def __call__(self, contest: Contest, tree: Tree | None, turn: int) -> DecodingTime:
        """Decodes a turn. Only plain decoding's texts are returned: the drafter's are the same up to rounding."""
        if (way := (tree, contest.rows, contest.temperature)) not in self._warm:
            self._decode(contest, tree, turn)
            self._warm.add(way)
        taken = self._decode(contest, tree, turn)
        return taken if tree is PLAIN else replace(taken, texts=[])

    def _decode(self, contest: Contest, tree: Tree | None, turn: int) -> DecodingTime:
        prompts = [contest.prompts[index] for index in contest.indices(turn)]
        inputs = pad_left(prompts, self._pad_token_id, input_device(self._target))
        options: dict[str, Any] = {"max_new_tokens": self._max_new_tokens, "do_sample": contest.temperature > 0}
        if contest.temperature:
            options |= {"temperature": contest.temperature, "top_k": 0}
        torch.manual_seed(turn)
        if tree is PLAIN:
            return time_plain(self._target, inputs, **options)
        # With pauses, cycles without drafts would be timed.
        settings = tree.settings | {"break_even": NEVER_PAUSES}
        if contest.drafter_alone:
            settings["prompt_lookup_num_tokens"] = 0
        if tree.vocabulary != "own":
            settings["draft_vocabulary"] = list(contest.counted) if tree.vocabulary == "counted" else None
        return time_drafted(self._target, self._drafter, inputs, settings, **options)
