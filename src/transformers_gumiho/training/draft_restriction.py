"""The tokens that a drafter is trained to draft: those that the training answers hold most often."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import GenerationConfig, Trainer
from transformers.utils import GENERATION_CONFIG_NAME

from ..commands import UserValueError
from .feature_cache import TargetFeatures, rows_without_states
from .losses.terms import LMHead


class DraftRestriction:
    """
    The draft vocabulary of a training with `draft_vocabulary_size`; without it, nothing is restricted.

    The cross-entropies are over these tokens alone. A position whose most likely token is none of them counts, too: it
    teaches the order of the others, and drafting continues from its feature. An EAGLE-3 head brings its tokens, and an
    output head of its own.

    Raises:
        ValueError: The size is out of range, or the drafter brings its tokens.
    """

    def __init__(self, trainer: Trainer):
        self._trainer, drafter = trainer, trainer.drafter
        self._size = trainer.args.draft_vocabulary_size
        self._vocab_size = drafter.config.get_text_config().vocab_size
        self._features: TargetFeatures = trainer.target_features
        self._token_ids: torch.Tensor | None = None
        self._own_head: torch.Tensor | None = None
        if drafter.config.is_eagle3:
            if self._size is not None:
                raise UserValueError(
                    f"`draft_vocabulary_size` is {self._size}, but an EAGLE-3 head scores the tokens of its own "
                    f"output head (`d2t`). Leave it out."
                )
            # FSDP may split it later.
            self._own_head = drafter.lm_head.weight.detach().to(trainer.args.device)
            if (token_ids := drafter.own_tokens()) is not None:
                self._restrict_to(token_ids)
        elif self._size is not None:
            smallest = max(len(self._kept()), 1)
            if not smallest <= self._size <= self._vocab_size:
                raise UserValueError(
                    f"`draft_vocabulary_size` must be from {smallest} (tokens that end a text are always in it) to "
                    f"the target's {self._vocab_size} tokens, or `None` for all, got {self._size}."
                )

    def _restrict_to(self, token_ids: torch.Tensor) -> None:
        self._token_ids = token_ids.to(self._trainer.args.device)
        self._features = self._trainer.target_features.restricted_to(self._token_ids)

    def heads(self, like: torch.Tensor) -> tuple[torch.Tensor | None, LMHead, LMHead]:
        """
        Returns the tokens `(K,)` that may be drafted, `None` for all, and the output heads that score states like
        `like` for them: those of the target, and those that the drafter predicts.
        """
        if self._token_ids is None:
            self.find(None)
        lm_head, weight = self._features.lm_head(like), self._own_head
        own_head = None if weight is None else lambda states: linear(states.to(weight), weight)
        return self._token_ids, lm_head, own_head or lm_head

    def find(self, checkpoint: str | None) -> None:
        """
        Restricts drafter and features to the vocabulary of the checkpoint to continue from; else to the drafter's own,
        filled up by counting if there is training data. Raises `ValueError` if it is of another size.
        """
        if self._size is None:
            return
        owner, found = f"the checkpoint {checkpoint!r}", _vocabulary_of(checkpoint)
        if found is None and self._token_ids is not None:
            return  # it was found in an earlier training or evaluation
        if found is None:
            owner, found = "the drafter, which has no training data to count in,", self._own()
            is_complete = len(found) == self._size and self._kept() <= set(found)
            if self._trainer.train_dataset is not None and not is_complete:
                found = self._count(self._size)
        if len(found) != self._size:
            raise UserValueError(
                f"`draft_vocabulary_size` is {self._size}, but {owner} has a draft vocabulary of {len(found)} tokens. "
                f"Set the size to that, or begin another training with that drafter."
            )
        self._trainer.drafter.generation_config.draft_vocabulary = list(found)
        self._restrict_to(torch.tensor(found))

    def _count(self, size: int) -> list[int]:
        trainer, processes = self._trainer, self._trainer.accelerator
        rows = processes.process_index, processes.num_processes
        counts = count_answer_tokens(trainer.train_dataset, trainer.data_collator, self._vocab_size, *rows)
        counts = processes.reduce(counts.to(trainer.args.device), "sum").cpu()
        return choose_draft_vocabulary(counts, size, self._kept(), own=self._own())

    def _own(self) -> list[int]:
        """Returns the tokens that the drafter was trained to draft, if they are not all."""
        return list(self._trainer.drafter.generation_config.draft_vocabulary or ())

    def _kept(self) -> set[int]:
        """Returns the tokens that end a text, by what is known of the target."""
        features, found = self._trainer.target_features, set()
        generation_config = getattr(getattr(features, "target", None), "generation_config", None)
        configs = (features.config, features.config.get_text_config(decoder=True), generation_config)
        for source in (*configs, self._trainer.processing_class):
            ids = getattr(source, "eos_token_id", None)
            found |= set(ids if isinstance(ids, (list, tuple)) else () if ids is None else (ids,))
        return {token for token in found if 0 <= token < self._vocab_size}


def choose_draft_vocabulary(
    counts: torch.Tensor, size: int, kept: Iterable[int] = (), own: Iterable[int] = ()
) -> list[int]:
    """
    Returns the `size` tokens of the highest counts `(V,)`, the most frequent first, equally frequent ones by id. Those
    in `kept`, at most `size`, are always among them, and those in `own` come before all others.
    """
    always, first = set(kept), set(own)
    ranking = counts.argsort(descending=True, stable=True).tolist()
    chosen = set(sorted(ranking, key=lambda token: (token not in always, token not in first))[:size])
    return [token for token in ranking if token in chosen]


def count_answer_tokens(
    dataset: Any, collate: Callable[..., Any], vocab_size: int, first: int = 0, step: int = 1
) -> torch.Tensor:
    """
    Returns `(V,)`: how often each token follows a state that counts in the loss, in every `step`-th row from `first`
    on, for processes that share the rows. States are not read, and `collate` refuses broken rows.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long, device="cpu")
    for row in rows_without_states(dataset, range(first, len(dataset), step)):
        batch, length = collate([row]), len(row["input_ids"])  # what follows is padding
        tokens, mask = batch["input_ids"][0, :length], batch["loss_mask"][0, :length].bool()
        positions = batch.get("position_ids", torch.arange(length, device="cpu")[None])[0, :length]
        # The token must be of the same text, and not its second: nothing predicts the state at the first.
        counts_here = mask[:-1] & (positions[:-1] > 0) & (positions[1:] > positions[:-1])
        counts += torch.bincount(tokens[1:][counts_here], minlength=vocab_size)
    return counts


def _vocabulary_of(checkpoint: str | None) -> list[int] | None:
    """Returns the draft vocabulary that a checkpoint was trained with; `None` where it does not say."""
    if checkpoint is None or not (Path(checkpoint) / GENERATION_CONFIG_NAME).exists():  # as an adapter has none
        return None
    return getattr(GenerationConfig.from_pretrained(checkpoint), "draft_vocabulary", None)
