"""Adapters in training: on the drafter that is trained, and on the target that it is trained for."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from targets import LARGE_TREES, make_drafter, make_prompts, make_target
from trainers import losses_of, make_rows, trained
from transformers import PreTrainedModel

from transformers_gumiho import GumihoModel


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama").float()


def drafter_lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "fc", "linear"])


def texts(target: torch.nn.Module, assistant: object) -> tuple[torch.Tensor, list[list[int]]]:
    output = target.generate(
        **make_prompts([6]), max_new_tokens=40, do_sample=False, assistant_model=assistant,
        return_dict_in_generate=True,
    )  # fmt: skip
    return output.sequences, output.accepted_lengths


def test_lora_drafter_trains_saves_loads_and_drafts(target: PreTrainedModel, tmp_path: Path) -> None:
    base = make_drafter(target)
    base.save_pretrained(tmp_path / "base")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    wrapped = get_peft_model(base, drafter_lora())
    trainer = trained(target, tmp_path, wrapped, max_steps=40)
    assert losses_of(trainer)[-1] < 0.8 * losses_of(trainer)[0]
    assert trainer.evaluate()["eval_agreement_1"] > 0
    trainer.save_model(tmp_path / "adapter")
    saved = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in saved
    assert "model.safetensors" not in saved

    base.generation_config.break_even = LARGE_TREES["break_even"]  # which training removes: it never pauses here
    plain = target.generate(**make_prompts([6]), max_new_tokens=40, do_sample=False)
    sequences, accepted = texts(target, wrapped)
    assert torch.equal(sequences, plain)
    loaded = PeftModel.from_pretrained(GumihoModel.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert texts(target, loaded)[1] == accepted
    merged = loaded.merge_and_unload()
    assert isinstance(merged, GumihoModel)
    sequences, accepted_merged = texts(target, merged)
    assert torch.equal(sequences, plain)
    assert accepted_merged == accepted
    # The adapter is what drafts: without it these are the drafts of the base model.
    assert texts(target, GumihoModel.from_pretrained(tmp_path / "base"))[1] != accepted
    with wrapped.disable_adapter():
        assert texts(target, wrapped)[1] == texts(target, GumihoModel.from_pretrained(tmp_path / "base"))[1]
    for name, tensor in GumihoModel.from_pretrained(tmp_path / "base").state_dict().items():
        assert torch.equal(tensor, before[name])


def test_target_with_an_active_adapter_is_what_the_drafter_learns(tmp_path: Path) -> None:
    adapted = get_peft_model(
        make_target("llama").float(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    rows = make_rows(6)
    evaluations = []
    for target in (adapted, adapted.merge_and_unload()):
        drafter = make_drafter(make_target("llama").float())
        evaluations.append(losses_of(trained(target, tmp_path, drafter, max_steps=10, train_dataset=rows)))
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-3)
    unadapted = make_target("llama").float()
    trainer = trained(unadapted, tmp_path, max_steps=10, train_dataset=rows)
    assert losses_of(trainer) != pytest.approx(evaluations[0], rel=1e-3)
