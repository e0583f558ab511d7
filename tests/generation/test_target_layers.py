"""Drafters that read several of the target's layers: what they draft, learn and become in files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chains import make_chain_target
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from targets import equals_plain, make_drafter, make_pair, make_prompts, make_target
from transformers import LlamaConfig

from transformers_gumiho import GumihoConfig, GumihoModel
from transformers_gumiho.generation.verification.target_states import FeatureReader
from transformers_gumiho.internals import num_hooks
from transformers_gumiho.model.target_shape import TargetLayers


LAYERS = [0, 1, 2]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mistral"])
@pytest.mark.parametrize("layer_ids", [[0, 1, 2], [0], [1, 2]], ids=str)
def test_states_are_those_that_transformers_returns(family: str, layer_ids: list[int]) -> None:
    target, ids = make_target(family, num_layers=3), make_prompts([7])["input_ids"]
    with torch.no_grad():
        expected = target(ids, output_hidden_states=True).hidden_states
        found = FeatureReader(target, TargetLayers.of(layer_ids)).read(ids)
    assert torch.equal(found.target_states, torch.cat([expected[number + 1] for number in layer_ids], dim=-1))
    assert torch.equal(found.last, expected[-1])


# The same seed gives the same text where there is one row.
@pytest.mark.parametrize(
    ("lengths", "generation"),
    [([5], {"do_sample": False}), ([3, 6], {"do_sample": False}), ([5], {"do_sample": True, "temperature": 0.8})],
    ids=["greedy", "padded batch", "sampled"],
)
@pytest.mark.parametrize("layer_ids", [[0, 2], [1]], ids=str)
def test_text_equals_plain(layer_ids: list[int], lengths: list[int], generation: dict[str, Any]) -> None:
    target, drafter = make_pair(num_layers=3, target_layer_ids=layer_ids, num_assistant_tokens=20)
    arguments = {**make_prompts(lengths), "max_new_tokens": 30, **generation}
    for drafted in ({}, {"cache_implementation": "static", "disable_compile": True}, {"prefill_chunk_size": 2}):
        equals_plain(target, drafter, seed=3, drafted=drafted, **arguments)


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "bloom"])
def test_targets_that_verify_chains(family: str) -> None:
    target = make_chain_target(family)
    last = target.config.num_hidden_layers - 1
    drafter = make_drafter(target, target_layer_ids=[0, last])
    inputs = Inputs(drafter)
    for lengths in ([5], [3, 6]):
        text = equals_plain(target, drafter, lengths=lengths, max_new_tokens=20).sequences
        if len(lengths) == 1:
            with torch.no_grad():
                expected = as_read(FeatureReader(target, TargetLayers((0, last))).read(text).target_states)
            found = torch.cat(inputs.seen, dim=1)
            # Some recurrent layers compute in float32, and chunks otherwise than single tokens.
            torch.testing.assert_close(found, expected[:, : found.shape[1]], rtol=1e-3, atol=1e-3)


def as_read(states: torch.Tensor) -> torch.Tensor:
    """Two layers' states, of which the lower one's have a root mean square of 1."""
    lower, highest = states.chunk(2, dim=-1)
    return torch.cat((lower / (lower.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt(), highest), dim=-1)


class Inputs:
    """Records what a drafter's fusion reads of the target."""

    def __init__(self, drafter: GumihoModel):
        self.seen: list[torch.Tensor] = []
        drafter.layer_fusion.register_forward_hook(lambda module, args, output: self.seen.append(args[0]))


@pytest.mark.parametrize("kwargs", [{}, {"prefill_chunk_size": 3}], ids=str)
def test_decoding_reads_the_states_of_the_committed_text(kwargs: dict[str, Any]) -> None:
    target, prompts = make_target(num_layers=3), make_prompts([7])
    drafter = make_drafter(target, target_layer_ids=[0, 2], num_assistant_tokens=20)
    inputs = Inputs(drafter)
    text = target.generate(**prompts, max_new_tokens=25, do_sample=False, assistant_model=drafter, **kwargs)
    with torch.no_grad():
        expected = as_read(FeatureReader(target, TargetLayers((0, 2))).read(text).target_states)
    found = torch.cat(inputs.seen, dim=1)
    assert found.shape[1] > 20
    # Norms are computed in float32.
    torch.testing.assert_close(found, expected[:, : found.shape[1]], rtol=1e-5, atol=1e-6)
    assert not any(num_hooks(module) for module in target.modules()), "the target is left as it was"


@pytest.mark.parametrize("lengths", [[5], [4, 7]], ids=str)
def test_a_new_fusion_drafts_as_without(tmp_path: Path, caplog: pytest.LogCaptureFixture, lengths: list[int]) -> None:
    target = make_target(num_layers=3)
    make_drafter(target, num_assistant_tokens=20).save_pretrained(tmp_path)
    plain, fused = (
        GumihoModel.from_pretrained(tmp_path, dtype=torch.float64, **kwargs)
        for kwargs in ({}, {"target_layer_ids": LAYERS})
    )
    assert "reads one state of the target" in caplog.text
    arguments = {**make_prompts(lengths), "max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    expected, found = (target.generate(**arguments, assistant_model=drafter) for drafter in (plain, fused))
    assert found.accepted_lengths == expected.accepted_lengths
    assert torch.equal(found.sequences, expected.sequences)
    ids = arguments["input_ids"]
    with torch.no_grad():
        last, all_states = (
            FeatureReader(target, TargetLayers.of(layers)).read(ids).target_states[:, :-1] for layers in (None, LAYERS)
        )
        assert torch.equal(fused(ids[:, 1:], all_states).serial_features, plain(ids[:, 1:], last).serial_features)


def test_an_adapter_of_the_fusion_reads_what_it_reads() -> None:
    drafter = make_drafter(make_target(num_layers=3), target_layer_ids=[0, 2])
    wrapped = get_peft_model(drafter, LoraConfig(r=2, target_modules=["layer_fusion"], init_lora_weights=False))
    states = 10 * torch.randn(1, 5, drafter.config.drafter_input_size, dtype=drafter.dtype)
    with torch.no_grad():
        expected = drafter.read_target(states)
        torch.testing.assert_close(wrapped.merge_and_unload().read_target(states), expected)


def test_fusion_is_saved_and_loaded(tmp_path: Path) -> None:
    drafter = make_drafter(make_target(num_layers=3), target_layer_ids=[0, 2])
    drafter.save_pretrained(tmp_path)
    found = GumihoModel.from_pretrained(tmp_path)
    assert found.config.target_layer_ids == [0, 2]
    assert torch.equal(found.layer_fusion.weight, drafter.layer_fusion.weight)
    assert GumihoModel.from_pretrained(tmp_path, target_layer_ids=[0, 2]).config == found.config
    # Of another width, of the same one, and none.
    for others in ([0, 1, 2], [1, 2], None):
        kwargs = {"config": GumihoConfig.from_pretrained(tmp_path, target_layer_ids=others)}
        for way in (kwargs, {"target_layer_ids": others}):
            with pytest.raises(ValueError, match=r"layers \[0, 2\], and cannot be.*Leave `target_layer_ids` out"):
                GumihoModel.from_pretrained(tmp_path, **way)


def test_a_checkpoint_that_lost_its_fusion_is_damaged(tmp_path: Path) -> None:
    make_drafter(make_target(num_layers=3), target_layer_ids=[0, 2]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["layer_fusion.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for kwargs in ({}, {"target_layer_ids": [0, 2]}):
        with pytest.raises(ValueError, match=r"is damaged: .* layers \[0, 2\].* lack `layer_fusion\.weight`"):
            GumihoModel.from_pretrained(tmp_path, **kwargs)


def test_layers_are_counted_from_either_end() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=5)
    assert GumihoConfig.from_target(config, target_layer_ids=[-1, 0, 2]).target_layer_ids == [0, 2, 4]
    with pytest.raises(ValueError, match=r"has 5: numbers from 0 to 4.*Got \[0, 5\]"):
        GumihoConfig.from_target(config, target_layer_ids=[0, 5])
    for wrong in ([], [2, 1], [1, 1], [-1]):
        with pytest.raises(StrictDataclassError, match="numbers of layers in rising order"):
            GumihoConfig(target_layer_ids=wrong)


def test_a_target_without_the_layers_is_refused() -> None:
    target, drafter = make_pair(num_layers=3, target_layer_ids=LAYERS)
    drafter.config.target_layer_ids = [0, 1, 7]
    with pytest.raises(ValueError, match=r"reads the layers \[0, 1, 7\].*LlamaForCausalLM has 3, 0 to 2"):
        target.generate(**make_prompts([4]), assistant_model=drafter)
