"""What a user of `Trainer` expects of a drafter's trainer."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from eager_loss import gumiho_loss
from origins import Origins
from safetensors import safe_open
from targets import make_drafter, make_target
from trainers import KillAt, Killed, losses_of, make_args, make_rows, make_trainer, pack_pairs, trained
from training_data import DEMO_TARGET
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    TorchAoConfig,
    TrainerCallback,
    TrainingArguments,
)

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.observers import observing
from transformers_gumiho.internals import set_attention_implementation
from transformers_gumiho.training import GumihoTrainer, measure_acceptance
from transformers_gumiho.training.unrolling import unroll_serial_head


# Its name in newer releases of transformers, which warn of the other one.
CHECKPOINTING = (
    f"{'activation' if hasattr(TrainingArguments, 'activation_checkpointing') else 'gradient'}_checkpointing"
)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama").float()


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def terms_of(log: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in log.items() if "feature" in name or "ce" in name or name == "loss"}


@pytest.mark.parametrize("unroll", [False, True])
def test_the_loss_is_the_eager_one_and_falls(target: PreTrainedModel, tmp_path: Path, unroll: bool) -> None:
    rows = [{"input_ids": row["input_ids"][:12], "loss_mask": row["loss_mask"][:12]} for row in make_rows(4)]
    drafter = make_drafter(target)
    trainer = make_trainer(target, tmp_path, drafter, train_dataset=rows, max_steps=30, unroll_serial_head=unroll)
    ids, mask = (torch.tensor([row[name] for row in rows]) for name in ("input_ids", "loss_mask"))
    states = target.model(ids).last_hidden_state
    output = drafter(ids[:, 1:], states[:, :-1], unroll=unroll_serial_head if unroll else None)
    loss, terms = gumiho_loss(output, states, target.lm_head, mask, trainer.args.loss_weights())
    embedding = weights_of(drafter.embed_tokens)
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert {name: first[name] for name in terms} == pytest.approx({k: v.item() for k, v in terms.items()}, rel=1e-4)
    assert losses_of(trainer)[-1] < 0.5 * losses_of(trainer)[0]
    torch.testing.assert_close(weights_of(drafter.embed_tokens), embedding, rtol=0, atol=0)


def test_prompts_count_where_that_is_asked_for(target: PreTrainedModel, tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"][:9], "loss_mask": [0] * 5 + [1] * 3 + [0]} for row in make_rows(3)]
    rows += [{"input_ids": row["input_ids"][:7], "loss_mask": [0] * 5 + [1] + [0]} for row in make_rows(1)]
    # After the last token nothing is drafted.
    whole = [{"input_ids": row["input_ids"], "loss_mask": [1] * (len(row["input_ids"]) - 1) + [0]} for row in rows]
    trainers = [
        make_trainer(target, tmp_path, make_drafter(target), train_dataset=data, eval_dataset=rows, **settings)
        for data, settings in ((whole, {}), (rows, {"assistant_only_loss": False}), (rows, {}))
    ]
    for trainer in trainers:
        trainer.train()
    with_prompts, asked_for, answers = map(losses_of, trainers)
    assert asked_for == pytest.approx(with_prompts, rel=1e-5)
    assert asked_for != pytest.approx(answers, rel=1e-2)
    # Evaluations stay comparable.
    for trainer in trainers:
        trainer.model.load_state_dict(trainers[0].model.state_dict())
    assert trainers[1].evaluate()["eval_loss"] == pytest.approx(trainers[2].evaluate()["eval_loss"], rel=1e-5)
    with pytest.raises(ValueError, match="`assistant_only_loss=False` needs a GumihoDataCollator"):
        make_trainer(target, tmp_path, data_collator=lambda rows: rows[0], assistant_only_loss=False)


@pytest.mark.parametrize("unroll", [False, True])
def test_accumulated_batches_make_the_step_of_one_large_batch(
    target: PreTrainedModel, tmp_path: Path, unroll: bool
) -> None:
    results = []
    for size, num_batches in ((8, 1), (2, 4)):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": num_batches}
        trainer = trained(target, tmp_path, max_steps=3, unroll_serial_head=unroll, **settings)
        results.append((list(map(terms_of, trainer.state.log_history[:3])), weights_of(trainer.model)))
    for small, large in zip(results[0][0], results[1][0], strict=True):
        assert small == pytest.approx(large, rel=1e-4)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {CHECKPOINTING: True, "unroll_serial_head": True},
        {"torch_compile": True, "torch_compile_backend": "aot_eager", "unroll_serial_head": True},
        {"loss_chunk_size": 3},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_settings_that_save_memory_or_time_do_not_change_the_training(
    target: PreTrainedModel, tmp_path: Path, settings: dict[str, Any]
) -> None:
    unroll = {"unroll_serial_head": settings.get("unroll_serial_head", False)}
    rows = [row for row in make_rows() if len(row["input_ids"]) == 16]  # of other lengths, other graphs are compiled
    curves = []
    for changed in (settings, unroll):
        torch.manual_seed(0)
        drafter = GumihoModel.from_target(target, num_hidden_layers=1, num_parallel_heads=2, num_residual_blocks=1)
        curves.append(losses_of(trained(target, tmp_path, drafter, train_dataset=rows, **changed)))
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_bf16_trains_to_about_the_same_loss(target: PreTrainedModel, tmp_path: Path) -> None:
    curves = []
    for bf16 in (False, True, False):
        trainer = trained(target, tmp_path, bf16=bf16, max_steps=20)
        curves.append(losses_of(trainer))
    assert curves[1] == pytest.approx(curves[0], rel=0.1)
    assert curves[0] == curves[2] != curves[1], "each training of a process has its own precision"
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())


def test_an_offloaded_target_trains_like_a_whole_one(target: PreTrainedModel, tmp_path: Path) -> None:
    offloaded = make_target("llama").float()
    cpu_offload(offloaded, execution_device=torch.device("cpu"))
    curves = []
    for model in (target, offloaded):
        curves.append(losses_of(trained(model, tmp_path, make_drafter(target))))
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    with pytest.raises(ValueError, match="The target's token embedding is offloaded"):
        GumihoModel.from_target(offloaded)


def test_a_quantized_target_is_imitated_as_it_is(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    quantized = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, quantization_config=config, dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    rows = [{"input_ids": list(range(100 * row, 100 * row + 40))} for row in range(4)]
    ids = torch.tensor([row["input_ids"] for row in rows])
    torch.manual_seed(0)
    drafter = GumihoModel.from_target(quantized)
    states = quantized.model(ids).last_hidden_state
    assert not torch.allclose(states, whole.model(ids).last_hidden_state, rtol=1e-3, atol=1e-3)
    output = drafter(ids[:, 1:], states[:, :-1])
    loss, _ = gumiho_loss(output, states, quantized.lm_head, torch.ones_like(ids))
    trainer = trained(
        quantized, tmp_path, drafter, train_dataset=rows, max_steps=1, serial_ce_weight=0.1, parallel_ce_weight=0.1
    )
    assert losses_of(trainer)[0] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(("broken", "muon"), [(False, False), (True, hasattr(torch.optim, "Muon"))])
def test_a_resumed_run_has_the_curve_of_an_uninterrupted_one(
    target: PreTrainedModel, tmp_path: Path, broken: bool, muon: bool
) -> None:
    settings = {
        "max_steps": 8, "feature_noise": 0.5, "save_strategy": "steps", "save_steps": 2,
        "eval_strategy": "steps", "eval_steps": 4,
        "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "muon": muon,
    }  # fmt: skip
    whole = trained(target, tmp_path / "whole", **settings)
    killed = make_trainer(target, tmp_path / "killed", **settings, callbacks=[KillAt(5)])
    with pytest.raises(Killed):
        killed.train()
    if broken:  # the newest checkpoint was being written
        state = tmp_path / "killed" / "checkpoint-4" / "trainer_state.json"
        state.write_bytes(state.read_bytes()[:100])
    resumed = make_trainer(target, tmp_path / "killed", make_drafter(target, seed=5), **settings)
    resumed.train(resume_from_checkpoint=True)

    def curve(trainer: GumihoTrainer) -> list[dict[str, float]]:
        measured = ("epoch", "step", "learning_rate", "grad_norm")
        hidden = {f"{part}_{name}" for part in ("train", "eval") for name in ("runtime", "samples_per_second",
                  "steps_per_second")} | {"train_loss"}  # fmt: skip
        assert all(name in trainer.state.log_history[0] for name in measured)
        return [{k: v for k, v in entry.items() if k not in hidden} for entry in trainer.state.log_history]

    for ours, theirs in zip(curve(resumed), curve(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    torch.testing.assert_close(weights_of(resumed.model), weights_of(whole.model))


def test_checkpoints_hold_the_drafter_alone_and_load_as_one(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = make_drafter(target)
    trained(target, tmp_path, drafter, save_strategy="steps", save_steps=4)
    checkpoint = tmp_path / "checkpoint-4"
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(drafter.state_dict())
    loaded = GumihoModel.from_pretrained(checkpoint)
    torch.testing.assert_close(loaded.state_dict(), drafter.state_dict())
    assert loaded.generation_config.num_assistant_tokens == drafter.generation_config.num_assistant_tokens
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=loaded), plain)


def test_evaluation_is_the_agreement_of_the_drafts_with_the_target(target: PreTrainedModel, tmp_path: Path) -> None:
    """Position by position: each draft from the text up to there and the drafter's own features."""
    rows = make_rows(6, seed=1)
    drafter = make_drafter(target)
    trainer = make_trainer(target, tmp_path, drafter, eval_dataset=rows, per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    agreements: list[list[float]] = [[] for _ in range(7)]
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        states = target.model(ids).last_hidden_state
        output = drafter(ids[:, 1:], states[:, :-1], unroll=unroll_serial_head)
        features = [output.serial_features, output.unrolled_features[0], *output.parallel_features.unbind(1)]
        for position, predicted in enumerate(features):
            drafts = target.lm_head(predicted).argmax(dim=-1)[0]
            for index in range(position + 1, ids.shape[1]):
                if row["loss_mask"][index]:
                    wanted = target.lm_head(states[0, index]).argmax()
                    agreements[position].append(float(drafts[index - position - 1] == wanted))
    expected = [sum(values) / len(values) for values in agreements]
    assert [metrics[f"eval_agreement_{position}"] for position in range(1, 8)] == pytest.approx(expected)
    implied = 1 + sum(math.prod(expected[: position + 1]) for position in range(7))
    assert metrics["eval_expected_acceptance_length"] == pytest.approx(implied)


def test_tau_is_that_of_cycles_that_draft(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter in training would pause most of the time, and a target of beams cannot draft."""
    monkeypatch.setattr(target.generation_config, "num_beams", 2)
    drafter = GumihoModel.from_target(target)
    drafter.generation_config.update(num_assistant_tokens=5, break_even=50.0)
    with observing(origins := Origins()):
        measure_acceptance(target, drafter, [torch.tensor([1, 2, 3])], 40)
        measure_acceptance(target, drafter, [[1, 2, 3]], 4)
    assert set(origins.sources) - {"end"} == {"drafter"}
    assert drafter.generation_config.break_even == 50.0


def test_a_drafter_has_a_filled_model_card(target: PreTrainedModel, tmp_path: Path) -> None:
    trainer = trained(target, tmp_path, eval_strategy="steps", eval_steps=4)
    names = {"model_name": "someone/gumiho-tiny", "finetuned_from": "someone/tiny-llama", "dataset": "someone/chats"}
    trainer.create_model_card(**names)
    card = (tmp_path / "README.md").read_text()
    history = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    for fact in (
        "base_model: someone/tiny-llama",
        "- someone/chats",
        "- speculative-decoding",
        "# someone/gumiho-tiny\n",
        'from_pretrained("someone/gumiho-tiny"',
        "| `learning_rate` | 0.01 |",
        f"| `eval_agreement_1` | {history['eval_agreement_1']:.4g} |",
    ):
        assert fact in card


def test_the_drafter_keeps_the_tokenizer_that_the_trainer_was_given(target: PreTrainedModel, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET)
    trainer = make_trainer(target, tmp_path, processing_class=tokenizer)
    trainer.save_model(tmp_path / "saved")
    trainer.drafter.save_pretrained(tmp_path / "saved again")
    for folder in ("saved", "saved again"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder).get_vocab() == tokenizer.get_vocab()


class Poison(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            model.fc.weight.data[0, 0] = math.nan


def test_a_diverged_run_stops_and_keeps_its_checkpoints(target: PreTrainedModel, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 10, "save_total_limit": 1}
    trainer = make_trainer(target, tmp_path, callbacks=[Poison(5)], **settings)
    with pytest.raises(FloatingPointError, match=r"diverged at or before step 6: .*checkpoint-4, is from before that"):
        trainer.train()
    # Where nothing is logged in time, the checkpoint is refused.
    trainer = make_trainer(target, tmp_path, callbacks=[Poison(5)], **settings | {"logging_steps": 100})
    with pytest.raises(FloatingPointError, match=r"step 6: the drafter's parameters are not finite"):
        trainer.train()
    kept = GumihoModel.from_pretrained(tmp_path / "checkpoint-4")
    assert all(torch.isfinite(parameter).all() for parameter in kept.parameters())
    assert json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4
    with pytest.raises(FloatingPointError, match=r"the drafter's parameters are not finite\. There is no checkpoint"):
        trained(target, tmp_path / "end", callbacks=[Poison(3)], logging_steps=100)


@pytest.mark.parametrize("settings", [{}, {"logging_steps": 100}, {"linear_start": True}])
def test_a_target_that_overflows_is_named(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The drafter's training has not diverged, and a lower learning rate would not help."""
    large = make_target("llama").half()
    large.model.norm.weight.data.fill_(6e4)
    trainer = make_trainer(large, tmp_path, drafter=make_drafter(large).float(), **settings)
    message = r"target's own states are not finite \(torch.float16\). It overflows in float16: load it in bfloat16"
    with pytest.raises((FloatingPointError, ValueError), match=message):
        trainer.train()
    with pytest.raises(FloatingPointError, match=message):
        trainer.evaluate()


def test_data_without_anything_to_learn_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 0, 0]}, {"input_ids": [1]}] * 2
    with pytest.raises(ValueError, match=r"no state that counts, .*see to `loss_mask`, or `labels`"):
        trained(target, tmp_path, train_dataset=rows)
    with pytest.raises(ValueError, match="no state that counts, so there is nothing to evaluate"):
        make_trainer(target, tmp_path, eval_dataset=rows).evaluate()
    # One row that teaches something is enough.
    rows = [*rows, {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4]}]
    trainer = trained(target, tmp_path, train_dataset=rows, per_device_train_batch_size=1, max_steps=6)
    # Six rows of five are read, and those that teach nothing cost nothing.
    assert sum(loss > 0 for loss in losses_of(trainer)) in (1, 2)


def test_a_drafter_in_half_precision_is_warned_of(
    target: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        make_trainer(target, tmp_path, make_drafter(target).bfloat16())
    assert "in which small updates are lost. Train `drafter.float()`" in caplog.text


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt", "mistral", "gpt_oss", "mixtral"])
def test_packed_rows_train_as_their_texts_do_alone(tmp_path: Path, family: str) -> None:
    target = make_target(family).float()
    texts = [row["input_ids"] for row in make_rows(6)]
    alone = [{"input_ids": text} for text in texts]
    results = []
    for rows in (alone, pack_pairs(alone)):
        trainer = make_trainer(target, tmp_path, eval_dataset=rows)
        results.append({k: v for k, v in trainer.evaluate().items() if "loss" in k or "agreement" in k})
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_target_that_mixes_packed_texts_up_is_refused(tmp_path: Path) -> None:
    class Mixing(torch.nn.Module):
        """A decoder that makes a mask of its own, under which the second text of a row sees the first."""

        def __init__(self, decoder: torch.nn.Module):
            super().__init__()
            self.decoder = decoder

        def forward(self, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
            return self.decoder(**kwargs)

    target = make_target("llama").float()
    mixing = Mixing(target.model)
    target.get_decoder = lambda: mixing
    rows = [{"input_ids": [1, 2, 3, 4, 5, 6], "position_ids": [0, 1, 2, 0, 1, 2]}]
    with pytest.raises(
        ValueError, match=r"does not keep packed texts apart: .* Prepare the dataset with `packing=False`"
    ):
        trained(target, tmp_path, train_dataset=rows)


def test_wrong_arguments_are_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ValueError, match="There is no complete checkpoint in"):
        make_trainer(target, tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(TypeError, match="must be a GumihoModel, or a PeftModel around one, got LlamaForCausalLM"):
        make_trainer(target, tmp_path, target)
    other = make_drafter(make_target("llama", vocab_size=9))
    with pytest.raises(ValueError, match=r"hidden size 32 and 9 tokens, the target 32 and 8\. Make a drafter"):
        make_trainer(target, tmp_path, other)
    with pytest.raises(ValueError, match="`label_smoothing_factor` has no effect"):
        make_args(tmp_path, label_smoothing_factor=0.1)
    loss: dict[str, Any] = {"compute_loss_func": lambda *_, **__: 0}
    with pytest.raises(ValueError, match="`compute_loss_func` is never called"):
        GumihoTrainer(make_drafter(target), make_args(tmp_path), target=target, **loss)
    with pytest.raises(ValueError, match="`remove_unused_columns=True` would drop the loss mask"):
        make_args(tmp_path, remove_unused_columns=True)
    with pytest.raises(ValueError, match="this GumihoModel is a drafter"):
        make_trainer(make_drafter(target), tmp_path, make_drafter(target))
    flash = make_drafter(target)
    set_attention_implementation(flash.config, "flash_attention_2")
    with pytest.raises(ValueError, match="The drafter's attention is 'flash_attention_2'"):
        make_trainer(target, tmp_path, flash)
    with pytest.raises(ValueError, match="`loss_chunk_size` must be at least 1, got 0"):
        make_args(tmp_path, loss_chunk_size=0)


def test_a_step_of_tokens_is_the_same_in_passes_of_any_size(target: PreTrainedModel, tmp_path: Path) -> None:
    """And an evaluation says what it says in batches of rows."""
    found = []
    for size in (64, 16):
        torch.manual_seed(0)
        trainer = trained(target, tmp_path / str(size), tokens_per_step=64, tokens_per_pass=size, num_train_epochs=2)
        found.append((losses_of(trainer), trainer.evaluate()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    trainer.args.tokens_per_step = trainer.args.tokens_per_pass = None
    by_rows = trainer.evaluate()
    for name in ("eval_loss", "eval_agreement_1", "eval_expected_acceptance_length"):
        assert found[0][1][name] == pytest.approx(found[1][1][name], rel=1e-4)
        assert by_rows[name] == pytest.approx(found[1][1][name], rel=1e-4)
    with pytest.raises(ValueError, match="`gradient_accumulation_steps=2` counts batches of rows"):
        make_args(tmp_path, tokens_per_step=64, gradient_accumulation_steps=2)


def test_an_evaluation_in_half_precision_leaves_the_drafter_as_it_was(target: PreTrainedModel, tmp_path: Path) -> None:
    trainer = make_trainer(target, tmp_path, bf16_full_eval=True)
    before = {name: parameter.clone() for name, parameter in trainer.drafter.named_parameters()}
    trainer.evaluate()
    assert all(torch.equal(parameter, before[name]) for name, parameter in trainer.drafter.named_parameters())
