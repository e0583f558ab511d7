"""Further loss terms by name: a function and a place in one table make a term of every training."""

from pathlib import Path

import pytest
import torch
from targets import make_drafter, make_target
from torch.nn import functional as F
from trainers import make_args, make_rows
from transformers import HfArgumentParser, PreTrainedModel

from transformers_gumiho.losses.terms import TERMS, Readout
from transformers_gumiho.training import GumihoTrainer, GumihoTrainingArguments, gumiho_loss


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama").float()


def reverse_divergence(prediction: Readout, target: Readout, weights: torch.Tensor) -> torch.Tensor:
    log_probs = prediction.logits.log_softmax(dim=-1)
    return (log_probs.exp() * (log_probs - target.probs.log())).sum(dim=-1) * weights


def angle(prediction: Readout, target: Readout, weights: torch.Tensor) -> torch.Tensor:
    return (1 - F.cosine_similarity(prediction.states, target.states, dim=-1)) * weights


def test_an_added_term_trains(target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TERMS, "reverse", reverse_divergence)
    monkeypatch.setitem(TERMS, "angle", angle)
    rows = [{"input_ids": row["input_ids"][:12], "loss_mask": row["loss_mask"][:12]} for row in make_rows(4)]
    drafter = make_drafter(target)
    args = make_args(
        tmp_path, max_steps=12, feature_weight=0.0, serial_ce_weight=0.0, parallel_ce_weight=0.0,
        loss_term_weights={"reverse": 0.5, "angle": 2.0}, loss_chunk_size=5,
    )  # fmt: skip
    ids, mask = (torch.tensor([row[name] for row in rows]) for name in ("input_ids", "loss_mask"))
    states = target.model(ids).last_hidden_state
    output = drafter(ids[:, 1:], states[:, :-1])
    loss, terms = gumiho_loss(output, states, target.lm_head, mask, args.loss_weights(None))
    loss.backward()
    trained = [p for name, p in drafter.named_parameters() if name != "embed_tokens.weight"]
    norm = torch.stack([p.grad.norm() for p in trained]).norm().item()
    trainer = GumihoTrainer(drafter, args, target=target, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()
    assert before["eval_serial_reverse"] == pytest.approx(terms["serial_reverse"].item(), rel=1e-4)
    trainer.train()
    first, after = trainer.state.log_history[0], trainer.evaluate()
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert first["parallel_3_angle"] == pytest.approx(terms["parallel_3_angle"].item(), rel=1e-4)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert "serial_ce" not in first  # of weight zero
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_serial_angle"] < before["eval_serial_angle"]


def test_weights_come_from_the_command_line_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TERMS, "angle", angle)
    options = ["--output_dir", str(tmp_path), "--loss_term_weights", '{"angle": 0.25}']
    (args,) = HfArgumentParser(GumihoTrainingArguments).parse_args_into_dataclasses(options)
    assert args.loss_weights(None).further == {"angle": 0.25}


@pytest.mark.parametrize("name", ["angel", "ce"])
def test_a_weight_without_a_term_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"There is no further loss term '{name}'"):
        make_args(tmp_path, loss_term_weights={name: 0.1})
