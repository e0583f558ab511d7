"""Drafters in the ways that vLLM can be run: many requests, compiled, bf16, processes, adapters, the server."""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from servers import serving
from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest
from vllm_engine import (
    DEMO_DRAFTER,
    DEMO_TARGET,
    acceptance_length,
    demo_prompts,
    drafter_of,
    drafting_with,
    engine,
    metric,
    runner_of,
    write_texts,
)
from vllm_pairs import FIELDS, make_gumiho, make_transitions_felt, write_target


# Prompts of different lengths, which wait for each other and are read in pieces: fewer tokens fit into a step than 64
# requests verify.
LOAD = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 2**27}
PROMPTS = [prompt[start : start + 100 + start] for start in (0, 35, 70, 105, 140) for prompt in demo_prompts()][:300]
PROMPT_IDS = [[1, 2, 3, 4, 5], [6, 7, 1, 2], [3, 3, 5, 1, 7, 2, 6]]


def write_mixed_lengths(llm: Any) -> list[list[int]]:
    """Returns the tokens after each of 300 prompts: between 1 and 48 of them."""
    return write_texts(llm, PROMPTS, [1 + 7 * index % 48 for index in range(len(PROMPTS))])


@pytest.mark.slow
def test_hundreds_of_requests_of_mixed_lengths() -> None:
    with engine(DEMO_TARGET, **LOAD) as llm:
        plain = write_mixed_lengths(llm)
    assert len(plain) == 300
    assert {len(text) for text in plain} == set(range(1, 49))
    with engine(DEMO_TARGET, drafting_with(DEMO_DRAFTER, 7), **LOAD) as llm:
        assert write_mixed_lengths(llm) == plain
        assert acceptance_length(llm) > 3


@pytest.mark.slow
def test_compiled_models_write_what_eager_ones_do() -> None:
    with engine(DEMO_TARGET) as llm:
        plain = write_texts(llm, PROMPTS[:16])
    with engine(DEMO_TARGET, drafting_with(DEMO_DRAFTER, 7), enforce_eager=False) as llm:
        assert write_texts(llm, PROMPTS[:16]) == plain
        assert acceptance_length(llm) > 3


@pytest.mark.slow
def test_bf16_drafts_as_much() -> None:
    """Its texts may part from plain ones where two tokens are alike: a pass over several tokens rounds otherwise."""
    with engine(DEMO_TARGET, dtype="bfloat16", max_num_seqs=64) as llm:
        plain = write_texts(llm, demo_prompts())
    with engine(DEMO_TARGET, drafting_with(DEMO_DRAFTER, 7), dtype="bfloat16", max_num_seqs=64) as llm:
        texts = write_texts(llm, demo_prompts())
        assert acceptance_length(llm) > 3
    different = sum(text != other for text, other in zip(texts, plain, strict=True))
    sys.stdout.write(f"bf16: {different} of {len(texts)} texts differ\n")
    assert different < len(texts) / 4


@pytest.mark.slow
def test_two_processes_draft_what_one_does(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", LlamaConfig(**FIELDS | {"num_key_value_heads": 2}, vocab_size=6))
    gumiho = make_gumiho(target, transition_rank=4)
    make_transitions_felt(gumiho)
    # Of a head of which each process has a part, the logits are cut.
    gumiho.generation_config.draft_vocabulary = [5, 1, 2, 4]
    gumiho.save_pretrained(tmp_path / "gumiho")
    found = []
    for num_processes in (1, 2):
        settings = {"skip_tokenizer_init": True, "tensor_parallel_size": num_processes}
        with engine(tmp_path / "target", drafting_with(tmp_path / "gumiho", 4), **settings) as llm:
            texts = write_texts(llm, PROMPT_IDS, 96, detokenize=False)
            found.append((texts, metric(llm, "spec_decode_num_accepted_tokens_per_pos")))
    assert found[0] == found[1]
    # Of a drafter with random weights few tokens are accepted, and each of these is one that both drafted.
    assert sum(found[0][1]) > 10


def write_adapter(folder: Path) -> None:
    """Writes a random adapter for the attention of a target with [`FIELDS`]."""
    torch.manual_seed(2)
    tensors = {}
    for layer in range(2):
        for name, width in (("q_proj", 64), ("v_proj", 32)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = 0.3 * torch.randn(8, 64)
            tensors[f"{prefix}.lora_B.weight"] = 0.3 * torch.randn(width, 8)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8}
    fields |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": None}
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def test_requests_for_an_adapter_of_the_target(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", LlamaConfig(**FIELDS, vocab_size=64))
    make_gumiho(target).save_pretrained(tmp_path / "gumiho")
    write_adapter(tmp_path / "adapter")
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPT_IDS]
    settings = {"skip_tokenizer_init": True, "enable_lora": True, "max_lora_rank": 8}
    found = []
    for speculative_config in (None, drafting_with(tmp_path / "gumiho", 4)):
        with engine(tmp_path / "target", speculative_config, **settings) as llm:
            for request in (None, adapter):
                outputs = llm.generate(prompts, sampling, lora_request=request, use_tqdm=False)
                found.append([list(output.outputs[0].token_ids) for output in outputs])
            if speculative_config is not None:
                # Of the target's own, the drafter reads what is below the adapters.
                wrapped, drafter = runner_of(llm).model.model.embed_tokens, drafter_of(llm).model
                assert isinstance(wrapped, BaseLayerWithLoRA)
                assert drafter.model.embed_tokens is wrapped.base_layer
                assert not isinstance(drafter.lm_head, BaseLayerWithLoRA)
    plain, adapted, *with_drafter = found
    assert with_drafter == [plain, adapted]
    assert plain != adapted


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_server_completes_as_without_a_drafter(num_replicas: int) -> None:
    prompts = PROMPTS[:4]
    with engine(DEMO_TARGET) as llm:
        sampling = SamplingParams(max_tokens=32, temperature=0.0)
        plain = [output.outputs[0].text for output in llm.generate(prompts, sampling, use_tqdm=False)]
    fields = {"model": "demo", "prompt": prompts, "max_tokens": 32, "temperature": 0}
    command = [
        "vllm.entrypoints.openai.api_server", "--model", DEMO_TARGET, "--served-model-name", "demo", "--dtype",
        "float32", "--enforce-eager", "--max-model-len", 256, "--kv-cache-memory-bytes", 2**26,
        "--data-parallel-size", num_replicas, "--speculative-config", json.dumps(drafting_with(DEMO_DRAFTER, 7)),
    ]  # fmt: skip
    with serving(*command, VLLM_ENABLE_V1_MULTIPROCESSING="1") as (address, _):
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            choices = json.loads(answer.read())["choices"]
        with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
    assert [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])] == plain
    accepted = [line for line in lines if line.startswith("vllm:spec_decode_num_accepted_tokens_total{")]
    assert len(accepted) == num_replicas
    assert all(float(line.split()[-1]) > 0 for line in accepted)
