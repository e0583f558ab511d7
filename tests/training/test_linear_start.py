"""A new drafter that begins as the best linear guess of the target's next state, and when it does not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from targets import make_target
from trainers import make_args, make_rows, pack_pairs
from transformers import PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.training import GumihoTrainer, linear_start
from transformers_gumiho.training import trainer as trainer_module


def make_trainer(target: PreTrainedModel, folder: Path, layer_ids: Any = None, **settings: Any) -> GumihoTrainer:
    torch.manual_seed(0)
    bias = settings.pop("gumiho_fc_bias", True)
    drafter = GumihoModel.from_target(target, target_layer_ids=layer_ids, gumiho_fc_bias=bias).float()
    rows = settings.pop("train_dataset", None) or make_rows()
    # Nothing is learned, so the weights after training are those that it began with.
    args = make_args(folder, **{"learning_rate": 0.0, "max_steps": 2} | settings)
    return GumihoTrainer(drafter, args, target=target, train_dataset=rows)


def pairs(target: PreTrainedModel, drafter: GumihoModel, layer_ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What `fc` reads at each token of the answers, and the state that follows: one token at a time."""
    inputs, outputs = [], []
    for row in make_rows():
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            states = target(ids, output_hidden_states=True).hidden_states
            read = torch.cat([states[number + 1] for number in layer_ids], dim=-1) if layer_ids else states[-1]
            read = drafter.read_target(read)[0]
            for place, counts in enumerate(row["loss_mask"]):
                if counts and place:
                    embedding = target.get_input_embeddings()(ids[0, place])
                    inputs.append(torch.cat((embedding, read[place - 1])))
                    outputs.append(states[-1][0, place])
    return torch.stack(inputs).double(), torch.stack(outputs).double()


@pytest.mark.parametrize(
    ("layer_ids", "bias", "packed"),
    [(None, True, True), (None, False, False), ([0, 2], True, False), ([0, 2], False, True)],
)
def test_the_serial_head_begins_as_the_least_squares_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer_ids: list[int] | None, bias: bool, packed: bool
) -> None:
    monkeypatch.setattr(linear_start, "RIDGE", 1e-10)  # the rows hold few different tokens
    target = make_target("llama", num_layers=3).float()
    rows = make_rows()
    rows = pack_pairs(rows) if packed else rows
    trainer = make_trainer(target, tmp_path, layer_ids, linear_start=True, train_dataset=rows, gumiho_fc_bias=bias)
    trainer.train()
    drafter = trainer.drafter
    inputs, outputs = pairs(target, drafter, layer_ids)
    if bias:
        inputs = torch.cat((inputs, torch.ones_like(inputs[:, :1])), dim=1)
    assert len(inputs) > 2 * inputs.shape[1], "or every guess could be right"
    best = (inputs @ torch.linalg.pinv(inputs, rtol=1e-6) @ outputs - outputs).pow(2).mean()
    weight = torch.cat((drafter.fc.weight, drafter.fc.bias[:, None]), dim=1) if bias else drafter.fc.weight
    reached = (inputs @ weight.detach().double().T - outputs).pow(2).mean()
    assert float(reached) == pytest.approx(float(best), rel=1e-3)
    # And nothing is added to it.
    row = torch.tensor([make_rows()[0]["input_ids"]])
    states = torch.randn(1, row.shape[1], drafter.config.drafter_input_size)
    with torch.no_grad():
        features = drafter(input_ids=row, hidden_states=states).serial_features
        torch.testing.assert_close(features, drafter.fuse(row, drafter.read_target(states)))


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-4])
def test_embeddings_that_are_far_smaller_than_states_count(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings, states, never = (torch.randn(500, 8, generator=generator) for _ in range(3))
    outputs = torch.cat((embeddings, states), dim=1) @ torch.randn(16, 4, generator=generator)
    inputs = torch.cat((embeddings * scale, states, 0 * never, torch.ones(500, 1)), dim=1)
    fit = linear_start.LinearFit(25, 4, torch.device("cpu"))
    for part in range(0, 500, 100):
        fit.add(inputs[part : part + 100], outputs[part : part + 100])
    assert (inputs @ fit.solve().T - outputs).var() < 1e-6 * outputs.var()


def test_a_run_that_goes_on_begins_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that resumes nor a second training."""
    target = make_target("llama", num_layers=3).float()
    settings = {"learning_rate": 1e-2, "linear_start": True, "max_steps": 4}
    whole = make_trainer(target, tmp_path / "whole", **settings)
    whole.train()
    make_trainer(target, tmp_path / "parts", **settings, save_strategy="steps", save_steps=2).train()
    resumed = make_trainer(target, tmp_path / "parts", **settings)
    after = whole.drafter.fc.weight.clone()
    monkeypatch.setattr(trainer_module, "start_linearly", lambda *_: pytest.fail("begun again"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    torch.testing.assert_close(resumed.drafter.fc.weight, after)
    whole.train()


def test_first_rows_without_answers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where later ones have some."""
    monkeypatch.setattr(linear_start, "NUM_TOKENS", 4)
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}] * 4 + [{"input_ids": [1, 2, 3]}]
    trainer = make_trainer(make_target("llama", num_layers=3).float(), tmp_path, linear_start=True, train_dataset=rows)
    with pytest.raises(ValueError, match=r"no answers to begin with.*Train without `linear_start`"):
        trainer.train()
