"""Targets quantized by torchao: what is exact, and what a target that rounds its activations may change."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from transformers_gumiho import GumihoModel


quantization = pytest.importorskip("torchao.quantization")

DEMO_PAIR = Path(__file__).parents[2] / "examples" / "demo_pair"
PROMPTS = torch.tensor([list(range(100, 124)), list(range(900, 924))])


def load_target(config: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        DEMO_PAIR / "target", quantization_config=TorchAoConfig(config), dtype=torch.float32
    )


@pytest.fixture(scope="module")
def drafter() -> GumihoModel:
    return GumihoModel.from_pretrained(DEMO_PAIR / "gumiho", dtype=torch.float32)


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
    whole = AutoModelForCausalLM.from_pretrained(DEMO_PAIR / "target", dtype=torch.float32)
    assert not torch.allclose(target(PROMPTS).logits, whole(PROMPTS).logits, atol=1e-2), "it is quantized"
    settings = {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(PROMPTS, **settings)
    output = target.generate(PROMPTS, **settings, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert max(max(lengths) for lengths in output.accepted_lengths) >= 3
    sampled = []
    for assistant in ({}, {"assistant_model": drafter}):
        torch.manual_seed(0)
        sampled.append(target.generate(PROMPTS[:1], max_new_tokens=24, do_sample=True, **assistant))
    assert torch.equal(*sampled)


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
