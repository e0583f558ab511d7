"""Targets quantized by torchao: what is exact, and what a target that rounds its activations may change."""

from collections.abc import Callable

import pytest
import torch
from targets import equals_plain
from trained_pair import FOLDER, load_drafter, load_language_model
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from transformers_gumiho import GumihoModel


quantization = pytest.importorskip("torchao.quantization")

PROMPTS = torch.tensor([list(range(100, 124)), list(range(900, 924))])


def load_target(config: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        FOLDER / "target", quantization_config=TorchAoConfig(config), dtype=torch.float32
    )


@pytest.fixture(scope="module")
def drafter() -> GumihoModel:
    return load_drafter()


@pytest.mark.parametrize(
    "make_config",
    [
        lambda: quantization.Int8WeightOnlyConfig(),
        lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
    ],
    ids=["int8", "int4"],
)
def test_quantized_weights_decode_exactly(make_config: Callable[[], object], drafter: GumihoModel) -> None:
    target = load_target(make_config())
    logits, whole = target(PROMPTS).logits, load_language_model()(PROMPTS).logits
    assert not torch.allclose(logits, whole, atol=1e-2), "it is quantized"
    output = equals_plain(target, drafter, input_ids=PROMPTS, max_new_tokens=24)
    assert max(max(lengths) for lengths in output.accepted_lengths) >= 3
    equals_plain(target, drafter, input_ids=PROMPTS[:1], max_new_tokens=24, do_sample=True)


def test_quantized_activations_commit_tokens_the_target_chose(drafter: GumihoModel) -> None:
    target = load_target(quantization.Int8DynamicActivationInt8WeightConfig())
    output = target.generate(
        PROMPTS[:1], max_new_tokens=24, do_sample=False, assistant_model=drafter, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    new = output.sequences[:, -24:]
    assert torch.equal(torch.stack(output.logits, dim=1).argmax(dim=-1), new)
    # A rounding error of a sum that reaches the next integer is a step of the quantization.
    logits = target(output.sequences).logits[:, -25:-1]
    chosen = logits.gather(2, new[:, :, None]).squeeze(2)
    assert (logits.amax(dim=2) - chosen).max() < 0.25
