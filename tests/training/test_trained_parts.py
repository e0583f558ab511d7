"""`train_only`: one part of a drafter learns what it would learn among the others, and the others stay as they are."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from targets import make_target
from trainers import make_args, make_rows
from trainers import make_trainer as trainer_of

from transformers_gumiho import GumihoModel
from transformers_gumiho.training import GumihoTrainer
from transformers_gumiho.training.arguments import PARTS


def make_trainer(folder: Path, **settings: object) -> GumihoTrainer:
    target = make_target("llama", num_layers=3).float()
    torch.manual_seed(0)
    drafter = GumihoModel.from_target(target, transition_rank=4, target_layer_ids=[0, 2]).float()
    with torch.no_grad():
        for parameter in drafter.mlp.parameters():  # which are zero at the beginning, and give no gradients
            parameter.normal_(std=0.1)
    # Without a norm to clip, what a part learns depends on its own gradients alone; and on their size, unlike Adam's.
    settings = {"max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 0.3, "feature_noise": 0.2} | settings
    return trainer_of(target, folder, drafter, **settings)


def part_of(name: str) -> str:
    return "serial" if name.split(".")[0] in PARTS["serial"] else name.split(".")[0]


@pytest.mark.parametrize("part", ["serial", "parallel", "transition"])
def test_only_the_part_changes(tmp_path: Path, part: str) -> None:
    trainer = make_trainer(tmp_path, train_only=part)
    before = {name: tensor.clone() for name, tensor in trainer.drafter.state_dict().items()}
    trainer.train()
    for name, tensor in trainer.drafter.state_dict().items():
        assert torch.equal(tensor, before[name]) != (name.split(".")[0] in PARTS[part]), name


@pytest.mark.parametrize("settings", [{}, {"unroll_serial_head": True}, {"gradient_accumulation_steps": 2}], ids=str)
def test_the_serial_head_learns_as_if_there_were_no_heads(tmp_path: Path, settings: dict[str, object]) -> None:
    alone = make_trainer(tmp_path / "alone", train_only="serial", **settings)
    alone.train()
    whole = make_trainer(tmp_path / "whole", parallel_weight=0.0, **settings)
    whole.train()
    for name, tensor in alone.drafter.state_dict().items():
        if part_of(name) == "serial":
            torch.testing.assert_close(tensor, whole.drafter.state_dict()[name])
    terms = [{name for name in entry if name.startswith("parallel_")} for entry in alone.state.log_history]
    assert not any(terms), "heads were computed that are not trained"


def test_heads_and_transitions_learn_what_they_learn_beside_a_serial_head_that_stays(tmp_path: Path) -> None:
    alone = make_trainer(tmp_path / "alone", train_only="parallel", max_steps=1)
    alone.train()
    whole = make_trainer(tmp_path / "whole", max_steps=1)
    whole.train()
    for name, tensor in alone.drafter.state_dict().items():
        if part_of(name) != "serial":
            torch.testing.assert_close(tensor, whole.drafter.state_dict()[name])


def test_parts_that_are_not_there_or_stay_are_refused(tmp_path: Path) -> None:
    target = make_target("llama", num_layers=3).float()
    for part, fields in (("parallel", {"num_parallel_heads": 0}), ("transition", {})):
        drafter = GumihoModel.from_target(target, **fields).float()
        with pytest.raises(ValueError, match=rf"`train_only='{part}'` needs a drafter .*transition_rank=64"):
            trainer_of(target, tmp_path, drafter, train_only=part)
        with pytest.raises(ValueError, match=rf"begins a serial head anew, which `train_only='{part}'` leaves"):
            make_args(tmp_path, train_only=part, linear_start=True)
    with pytest.raises(ValueError, match=r"one of 'serial', 'parallel', 'transition', or None, got 'heads'"):
        make_args(tmp_path, train_only="heads")


@pytest.mark.parametrize(
    "option", [*({"train_only": part} for part in sorted(PARTS)), {"linear_start": True}], ids=str
)
def test_adapters_are_refused(tmp_path: Path, option: dict[str, object]) -> None:
    target = make_target("llama", num_layers=3).float()
    wrapped = get_peft_model(GumihoModel.from_target(target), LoraConfig(r=2, target_modules=["fc"]))
    with pytest.raises(ValueError, match=rf"`{next(iter(option))}` changes a GumihoModel itself.*merge_and_unload"):
        trainer_of(target, tmp_path, wrapped, **option)


def test_heads_that_are_not_trained_count_for_nothing_in_evaluation(tmp_path: Path) -> None:
    metrics = make_trainer(tmp_path, train_only="serial", feature_weight=1.0).evaluate(make_rows())
    terms = metrics["eval_serial_feature"] + 0.1 * metrics["eval_serial_ce"]
    unrolled = metrics["eval_unrolled_1_feature"] + 0.1 * metrics["eval_unrolled_1_ce"]
    assert metrics["eval_loss"] == pytest.approx(terms + unrolled, rel=1e-4)
    assert metrics["eval_agreement_5"] >= 0
