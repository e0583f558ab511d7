"""A drafter trained to draft some tokens only: those that the training answers hold most often."""

from pathlib import Path
from typing import Any

import pytest
import torch
import trainers
from datasets import Dataset, IterableDataset
from eager_loss import gumiho_loss
from targets import VOCAB_SIZE, make_drafter, make_target
from torch.nn import functional as F
from torch.utils.data import Subset
from trainers import KillAt, Killed, make_rows, pack_pairs
from transformers import PreTrainedModel

from transformers_gumiho.training import (
    GumihoDataCollator,
    draft_restriction,
)
from transformers_gumiho.training.draft_restriction import choose_draft_vocabulary, count_answer_tokens
from transformers_gumiho.training.unrolling import unroll_serial_head


@pytest.fixture
def target() -> PreTrainedModel:
    return make_target("llama").float()


def counts_by_hand(rows: list[dict[str, Any]]) -> list[int]:
    counts = [0] * VOCAB_SIZE
    for row in rows:
        ids, mask = row["input_ids"], row.get("loss_mask", [1] * len(row["input_ids"]))
        positions = row.get("position_ids", range(len(ids)))
        for place in range(len(ids) - 1):
            # The state at a text's first token has nothing before it that could predict it.
            if mask[place] and positions[place] > 0 and positions[place + 1] > 0:
                counts[ids[place + 1]] += 1
    return counts


def make_trainer(target: Any, folder: Path, drafter: Any = None, size: int | None = 4, **settings: Any) -> Any:
    return trainers.make_trainer(target, folder, drafter, draft_vocabulary_size=size, **settings)


@pytest.mark.parametrize("rows", [make_rows(), pack_pairs(make_rows()), [{"input_ids": [1, 2, 3, 3]}]])
def test_tokens_that_the_loss_predicts_are_counted(rows: list[dict[str, Any]]) -> None:
    collate, expected = GumihoDataCollator(VOCAB_SIZE), counts_by_hand(rows)
    assert count_answer_tokens(rows, collate, VOCAB_SIZE).tolist() == expected
    assert count_answer_tokens(Dataset.from_list(rows), collate, VOCAB_SIZE).tolist() == expected
    shares = [count_answer_tokens(rows, collate, VOCAB_SIZE, first, 3) for first in range(3)]
    assert sum(shares).tolist() == expected
    part = Subset(rows, range(0, len(rows), 2))
    assert count_answer_tokens(part, collate, VOCAB_SIZE).tolist() == counts_by_hand(rows[::2])
    # A user's own dataset of cached rows holds their states, too.
    with_states = [row | {"hidden_states": torch.zeros(len(row["input_ids"]), 2)} for row in rows]
    assert count_answer_tokens(with_states, collate, VOCAB_SIZE).tolist() == expected


def test_the_most_frequent_tokens_are_chosen() -> None:
    counts = torch.tensor([0, 5, 2, 7, 2, 2, 0, 0])
    assert choose_draft_vocabulary(counts, 4) == [3, 1, 2, 4]  # of three that are equally frequent the first two
    assert choose_draft_vocabulary(counts, 4, kept=[7, 3]) == [3, 1, 2, 7]
    assert choose_draft_vocabulary(counts, 7) == [3, 1, 2, 4, 5, 0, 6]
    assert sorted(choose_draft_vocabulary(counts, 8)) == list(range(8))


@pytest.mark.parametrize(
    ("own", "size", "expected"),
    [
        ([7, 3], 4, {0, 7, 3, 1}),  # the end, its own, and the most frequent one of the others
        ([7, 3], 3, {0, 7, 3}),
        ([7, 3], 2, {0, 3}),  # 3 is more frequent than 7
        ([0, 7, 3], 3, {0, 7, 3}),
    ],
)
def test_a_drafter_keeps_the_vocabulary_that_it_has(
    target: PreTrainedModel, tmp_path: Path, own: list[int], size: int, expected: set[int]
) -> None:
    target.generation_config.eos_token_id = 0
    rows = [{"input_ids": [2, 2, 1, 1, 1, 5, 5, 3, 1]}] * 4
    drafter = make_drafter(target)
    drafter.generation_config.draft_vocabulary = own
    make_trainer(target, tmp_path, drafter, size=size, train_dataset=rows, max_steps=1).train()
    assert set(drafter.generation_config.draft_vocabulary) == expected


def test_a_vocabulary_that_is_whole_needs_no_counting(target: PreTrainedModel, tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(lambda: iter(make_rows()))  # in which nothing can be counted
    drafter = make_drafter(target)
    drafter.generation_config.draft_vocabulary = [5, 2, 7]
    make_trainer(target, tmp_path, drafter, size=3, train_dataset=stream, max_steps=1).train()
    assert drafter.generation_config.draft_vocabulary == [5, 2, 7]


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the second caps its logits
def test_the_loss_is_the_eager_one_over_the_vocabulary(family: str, tmp_path: Path) -> None:
    target = make_target(family).float()
    rows = [{"input_ids": row["input_ids"][:12], "loss_mask": row["loss_mask"][:12]} for row in make_rows(4)]
    counts = torch.tensor(counts_by_hand(rows))
    vocabulary = counts.argsort(descending=True, stable=True)[:4]
    drafter = make_drafter(target)
    ids, mask = (torch.tensor([row[name] for row in rows]) for name in ("input_ids", "loss_mask"))
    states = target.model(ids).last_hidden_state

    def logits_of(features: torch.Tensor) -> torch.Tensor:
        logits = F.linear(features, target.lm_head.weight)
        cap = getattr(target.config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    def cut(features: torch.Tensor) -> torch.Tensor:
        return logits_of(features)[..., vocabulary]

    output = drafter(ids[:, 1:], states[:, :-1], unroll=unroll_serial_head)
    trainer = make_trainer(target, tmp_path, drafter, train_dataset=rows, eval_dataset=rows, unroll_serial_head=True)
    loss, terms = gumiho_loss(output, states, cut, mask, trainer.args.loss_weights())
    evaluated = trainer.evaluate()  # before any step
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert {name: first[name] for name in terms} == pytest.approx({k: v.item() for k, v in terms.items()}, rel=1e-4)
    assert evaluated["eval_loss"] == pytest.approx(loss.item(), rel=1e-4)
    # Agreement is with what the target says, whether it can be drafted or not.
    chosen = logits_of(states).argmax(dim=-1)[:, 1:]
    drafted = vocabulary[cut(output.serial_features).argmax(dim=-1)]
    counting = mask[:, 1:].bool()
    assert not torch.isin(chosen[counting], vocabulary).all()
    expected = (chosen == drafted)[counting].float().mean().item()
    assert evaluated["eval_agreement_1"] == pytest.approx(expected)


def test_a_resumed_run_has_the_vocabulary_and_the_end_of_an_uninterrupted_one(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    whole = make_trainer(target, tmp_path / "whole", **settings)
    whole.train()
    killed = make_trainer(target, tmp_path / "killed", **settings, callbacks=[KillAt(6)])
    with pytest.raises(Killed):
        killed.train()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("counted again, on what may be other data by now")

    monkeypatch.setattr(draft_restriction, "count_answer_tokens", refuse)
    resumed = make_trainer(target, tmp_path / "killed", make_drafter(target, seed=5), **settings)
    resumed.train(resume_from_checkpoint=True)
    torch.testing.assert_close(resumed.drafter.state_dict(), whole.drafter.state_dict())
    vocabularies = [trainer.drafter.generation_config.draft_vocabulary for trainer in (resumed, whole)]
    assert vocabularies[0] == vocabularies[1]
    other = make_trainer(target, tmp_path / "killed", size=5, **settings)
    with pytest.raises(ValueError, match=r"is 5, but the checkpoint '.*checkpoint-8' has a draft vocabulary of 4 tok"):
        other.train(resume_from_checkpoint=True)


def test_without_training_data_the_drafters_own_vocabulary_is_evaluated(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    drafter = make_drafter(target, draft_vocabulary=[3, 1, 6, 2])
    own = make_trainer(target, tmp_path, drafter, train_dataset=None).evaluate()
    whole = make_trainer(target, tmp_path, drafter, size=None, train_dataset=None).evaluate()
    assert own["eval_serial_ce"] < whole["eval_serial_ce"]
    with pytest.raises(ValueError, match=r"the drafter, which has no training data to count in, has .* of 4 tokens"):
        make_trainer(target, tmp_path, drafter, size=3, train_dataset=None).evaluate()


def test_tokens_that_end_a_text_can_always_be_drafted(target: PreTrainedModel, tmp_path: Path) -> None:
    target.generation_config.eos_token_id = [0, 7]  # no row holds either
    drafter = make_drafter(target)
    trainer = make_trainer(target, tmp_path, drafter, size=3, train_dataset=[{"input_ids": [1, 2, 3, 4, 3, 3]}])
    trainer.train()
    assert drafter.generation_config.draft_vocabulary == [3, 0, 7]
    with pytest.raises(ValueError, match=r"must be from 2 .* to the target's 8 tokens, .* got 1"):
        make_trainer(target, tmp_path, size=1)


def test_sizes_that_give_no_vocabulary_are_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be from 1 .* to the target's 8 tokens, .* got 9"):
        make_trainer(target, tmp_path, size=9)
    with pytest.raises(ValueError, match="`draft_vocabulary_size` must be at least 1, got 0"):
        make_trainer(target, tmp_path, size=0)
