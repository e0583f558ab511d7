"""A new drafter whose inputs count alike: what training begins with, and when it does not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.targets import make_target
from helpers.trainers import make_args, make_rows
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.training import GumihoTrainer
from transformers_gumiho.training import trainer as trainer_module
from transformers_gumiho.training.balanced_inputs import NUM_ROWS, SHARE


def make_unequal_target() -> PreTrainedModel:
    """A target whose embeddings are far smaller than its states."""
    target = make_target("llama").float()
    with torch.no_grad():
        target.model.embed_tokens.weight *= 0.05
    return target


def make_trainer(target: PreTrainedModel, folder: Path, layer_ids: Any = None, **settings: Any) -> GumihoTrainer:
    torch.manual_seed(0)
    drafter = GumihoModel.from_target(target, target_layer_ids=layer_ids).float()
    rows = settings.pop("train_dataset", None) or make_rows()
    # Nothing is learned, so the weights after training are those that it began with.
    args = make_args(folder, **{"learning_rate": 0.0, "max_steps": 2} | settings)
    return GumihoTrainer(drafter, args, target=target, train_dataset=rows)


def sizes(target: PreTrainedModel, drafter: GumihoModel, layer_ids: Any) -> tuple[float, float, float]:
    """What `fc` makes of embeddings, of states, and the states: one token of the first rows' answers at a time."""
    made: list[list[float]] = [[], [], []]
    for row in make_rows()[:NUM_ROWS]:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            outputs = target(ids, output_hidden_states=True)
            states = torch.cat([outputs.hidden_states[number + 1] for number in layer_ids or [-2]], dim=-1)
            read = drafter.read_target(states)[0]
            width = read.shape[1]
            for place, counts in enumerate(row["loss_mask"]):
                if counts:
                    embedding = target.get_input_embeddings()(ids[0, place])
                    values = drafter.fc.weight[:, :-width] @ embedding, drafter.fc.weight[:, -width:] @ read[place]
                    for sums, value in zip(made, (*values, read[place]), strict=True):
                        sums.append(float(value.pow(2).mean()))
    return tuple((sum(squares) / len(squares)) ** 0.5 for squares in made)  # type: ignore[return-value]


@pytest.mark.parametrize("layer_ids", [None, [0, 2]])
def test_both_inputs_begin_with_one_size(tmp_path: Path, layer_ids: list[int] | None) -> None:
    target = make_unequal_target()
    plain = make_trainer(target, tmp_path / "plain", layer_ids)
    plain.train()
    embeddings, states, _ = sizes(target, plain.drafter, layer_ids)
    assert embeddings < states / 3
    balanced = make_trainer(target, tmp_path / "balanced", layer_ids, balance_inputs=True)
    balanced.train()
    embeddings, states, read = sizes(target, balanced.drafter, layer_ids)
    assert embeddings == pytest.approx(SHARE * read, rel=1e-3)
    assert states == pytest.approx(SHARE * read, rel=1e-3)
    # Scaled, and otherwise what they were.
    for old, new in zip(plain.drafter.fc.weight[0].chunk(2), balanced.drafter.fc.weight[0].chunk(2), strict=True):
        torch.testing.assert_close(new / new.norm(), old / old.norm())


def test_a_run_that_goes_on_is_not_balanced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_unequal_target()
    settings = {"learning_rate": 1e-2, "balance_inputs": True}
    whole = make_trainer(target, tmp_path / "whole", **settings, max_steps=4)
    whole.train()
    make_trainer(target, tmp_path / "parts", **settings, max_steps=4, save_strategy="steps", save_steps=2).train()
    resumed = make_trainer(target, tmp_path / "parts", **settings, max_steps=4)
    monkeypatch.setattr(trainer_module, "balance_on_first_rows", lambda *_: pytest.fail("balanced again"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    torch.testing.assert_close(resumed.drafter.fc.weight, whole.drafter.fc.weight)


def test_a_second_training_is_not_balanced_again(tmp_path: Path) -> None:
    trainer = make_trainer(make_unequal_target(), tmp_path, balance_inputs=True)
    trainer.train()
    with torch.no_grad():
        trainer.drafter.fc.weight *= 2
    before = trainer.drafter.fc.weight.clone()
    trainer.train()
    torch.testing.assert_close(trainer.drafter.fc.weight, before)


def test_adapters_are_refused(tmp_path: Path) -> None:
    target = make_unequal_target()
    wrapped = get_peft_model(GumihoModel.from_target(target), LoraConfig(r=2, target_modules=["fc"]))
    with pytest.raises(ValueError, match=r"`balance_inputs` changes a GumihoModel itself.*merge_and_unload"):
        GumihoTrainer(wrapped, make_args(tmp_path, balance_inputs=True), target=target, train_dataset=make_rows())


def test_rows_without_answers_are_told_of(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}] * NUM_ROWS + make_rows()
    trainer = make_trainer(make_unequal_target(), tmp_path, balance_inputs=True, train_dataset=rows)
    with pytest.raises(ValueError, match=r"the first rows have no answers.*Train without `balance_inputs`"):
        trainer.train()
