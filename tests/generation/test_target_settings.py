"""Settings of a target and of PyTorch under which plain decoding works: drafting writes the same text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chains import make_chain_drafter, make_chain_target
from targets import equals_plain, make_drafter, make_prompts, make_target
from torch import nn
from trainers import losses_of, make_args, make_rows
from transformers import LlamaForCausalLM, PreTrainedModel

from transformers_gumiho import attached, free_memory
from transformers_gumiho.generation.verification.target_memory import memory_of
from transformers_gumiho.internals import compile_on_every_device
from transformers_gumiho.training import GumihoTrainer


@pytest.mark.parametrize("setting", ["output_router_logits", "output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_outputs_that_a_config_asks_for(family: str, setting: str) -> None:
    """Router logits come with a loss, which is computed from a mask of padding."""
    target = make_target(family, "eager")
    drafter = make_drafter(target)
    setattr(target.config, setting, True)
    prompt = make_prompts([6])["input_ids"]
    equals_plain(target, drafter, input_ids=prompt, max_new_tokens=16)
    with attached(target, drafter):
        drafted = target.generate(prompt, max_new_tokens=16, do_sample=False, return_dict_in_generate=True)
    assert drafted.accepted_lengths
    assert torch.equal(drafted.sequences, target.generate(prompt, max_new_tokens=16, do_sample=False))


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_another_default_device(family: str) -> None:
    target = make_chain_target(family) if family == "qwen3_5" else make_target(family)
    make = make_chain_drafter if family == "qwen3_5" else make_drafter
    drafter = make(target, draft_vocabulary=[0, 1, 2, 3, 4, 5])
    for do_sample in (False, True):
        for extra in ({}, {"prompt_lookup_num_tokens": 4}):
            call = {**make_prompts([6, 3]), "max_new_tokens": 16, "do_sample": do_sample}
            torch.manual_seed(0)
            plain = target.generate(**call)
            torch.manual_seed(0)
            with torch.device("meta"):  # stands for any device that is not the target's
                drafted = target.generate(**call, assistant_model=drafter, **extra)
            assert torch.equal(drafted, plain)


class ConvertingHead(nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states.to(self.weight.dtype))


class WideLlama(LlamaForCausalLM):
    """A target whose last norm returns float32, before a head in 16 bits or in float32."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.lm_head = ConvertingHead(config.hidden_size, config.vocab_size, bias=False)


def wide_target(family: str) -> PreTrainedModel:
    if family != "llama":
        return make_chain_target(family).bfloat16()
    torch.manual_seed(0)
    target = WideLlama(make_target().config).eval().bfloat16()
    target.model.norm.float()
    return target


@pytest.mark.parametrize("vocabulary", [None, [1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize("family", ["mamba", "mamba2", "llama"])
def test_states_in_float32_before_a_head_in_16_bits(family: str, vocabulary: list[int] | None, tmp_path: Path) -> None:
    target = wide_target(family)
    drafter = (make_drafter if family == "llama" else make_chain_drafter)(target, draft_vocabulary=vocabulary)
    if family != "mamba":  # which computes other states in passes over several tokens, and is refused
        prompt = make_prompts([6])["input_ids"]
        output = target.generate(
            prompt, max_new_tokens=16, do_sample=False, assistant_model=drafter, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip
        assert len(output.accepted_lengths[0]) >= 1
        # The first token comes from the prefill, which rounds as in plain decoding.
        assert output.sequences[0, 6] == target.generate(prompt, max_new_tokens=1, do_sample=False)[0, 6]
    if vocabulary is None:
        trainer = GumihoTrainer(drafter.float(), make_args(tmp_path), target=target, train_dataset=make_rows())
        trainer.train()
        assert all(loss < 20 for loss in losses_of(trainer))


def test_memory_of_compiled_calls() -> None:
    """What a call keeps can be used in and out of inference mode, and freed."""
    target = make_target(num_layers=1)
    drafter = make_drafter(target, num_assistant_tokens=8, num_layers=1)
    compiled = {"cache_implementation": "static", "compile_config": compile_on_every_device(backend="eager")}
    for in_inference_mode in (True, False, True):
        with torch.inference_mode(in_inference_mode):
            equals_plain(target, drafter, drafted=compiled, max_new_tokens=12)
    assert memory_of(target).static
    free_memory(target)
    assert not memory_of(target).static
    equals_plain(target, drafter, drafted=compiled, max_new_tokens=12)
