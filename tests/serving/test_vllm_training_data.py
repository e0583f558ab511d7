"""Training data from vLLM's server: the rows that the same target writes in this process, byte for byte."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chat_target import make_chat_target, make_chat_tokenizer
from datasets import Dataset
from servers import serving
from training_data import MESSAGES, read_jsonl
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from transformers_gumiho.training import LocalEngine, Sampling, ServerEngine, WritingSettings, regenerate_dataset
from transformers_gumiho.training.writing.requests import Request


# Thinks, and drops its earlier thoughts, as Qwen3's template does.
THINKING = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}{% set said = m.content or '' %}{% if m.role == 'assistant' and '</think>' in said %}
{%- set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>{{ m.role }}
{{ said }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "list_paths", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, Path]:
    """A target that writes marks of reasoning and of its end wherever they come to it."""
    tokenizer, target = make_chat_tokenizer(THINKING), make_chat_target(num_heads=1)
    tokenizer.add_tokens(["<think>", "</think>"])
    target.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    prompts = [tokenizer(f"import what, in {index}?")["input_ids"] for index in range(8)]
    answers = LocalEngine(target).complete([Request(prompt, 40, None, 0) for prompt in prompts])
    written = Counter(token for answer, _ in answers for token in answer if token != tokenizer.eos_token_id)
    with torch.no_grad():  # the marks come in the place of the tokens that come most often
        marks, tokens = tokenizer.convert_tokens_to_ids(["<think>", "</think>"]), written.most_common(2)
        # Not both by the same factor: of two that are equal, a server may take another one.
        target.lm_head.weight[marks] = target.lm_head.weight[[token for token, _ in tokens]] * torch.tensor(
            [[1.05], [1.04]]
        )
    target.generation_config.do_sample = False
    folder = tmp_path_factory.mktemp("thinker")
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return target, tokenizer, folder


@pytest.fixture(scope="module")
def address(thinker: tuple[PreTrainedModel, PreTrainedTokenizerFast, Path]) -> Iterator[str]:
    """The address of vLLM's server with this target, which keeps reasoning apart in conversations."""
    command = [
        "vllm.entrypoints.openai.api_server", "--model", thinker[2], "--served-model-name", "t", "--dtype", "float32",
        "--enforce-eager", "--max-model-len", 256, "--reasoning-parser", "qwen3", "--kv-cache-memory-bytes", 2**26,
    ]  # fmt: skip
    with serving(*command, VLLM_ENABLE_V1_MULTIPROCESSING="1") as (url, _):
        yield url


def test_a_server_writes_what_the_target_writes_here(
    thinker: tuple[PreTrainedModel, PreTrainedTokenizerFast, Path], address: str, tmp_path: Path
) -> None:
    """Two turns, tools, arguments of the template, a prompt that is too long for the server, and what ends."""
    target, tokenizer, _ = thinker
    questions = [[{"role": "user", "content": f"import what, in {index}?"}] for index in range(24)]
    rows = [{"messages": messages, "tools": None, "chat_template_kwargs": None} for messages in [MESSAGES, *questions]]
    rows[2]["tools"], rows[3]["chat_template_kwargs"] = json.dumps(TOOLS), json.dumps({"enable_thinking": False})
    settings = WritingSettings(max_length=250, max_new_tokens=40, sampling=Sampling(share=0.0))
    files = {}
    for name, engine in {"here": LocalEngine(target), "there": ServerEngine(address, "t", tokenizer)}.items():
        regenerate_dataset(Dataset.from_list(rows), engine, tokenizer, tmp_path / f"{name}.jsonl", settings)
        files[name] = (tmp_path / f"{name}.jsonl").read_bytes()
    assert files["there"] == files["here"]
    found = read_jsonl(tmp_path / "there.jsonl")
    assert len(found[0]["generations"]) == 2
    assert "list_paths" in tokenizer.decode(found[2]["generations"][0]["prompt_ids"])
    assert tokenizer.decode(found[3]["generations"][0]["prompt_ids"]).endswith("<think>\n\n</think>\n\n")
    assert any("<think>" in row["messages"][-1]["content"] for row in found if "messages" in row)
    assert all(row["generations"][-1]["answer_ids"][-1] == tokenizer.eos_token_id for row in found if row.get("ended"))
    assert any(row.get("ended") for row in found)
    # What it refuses costs its row alone, and a share that is sampled is sampled.
    rows[1]["messages"] = [{"role": "user", "content": "import os\n" * 100}]
    more = WritingSettings(max_length=500, max_new_tokens=40, sampling=Sampling(share=0.5))
    engine = ServerEngine([address, address], "t", tokenizer)
    regenerate_dataset(Dataset.from_list(rows), engine, tokenizer, tmp_path / "sampled.jsonl", more)
    sampled = read_jsonl(tmp_path / "sampled.jsonl")
    assert sampled[1]["skipped"].startswith("the server refuses it (400)")
    assert {row["sampled"] for row in sampled if "messages" in row} == {True, False}
    same = [new["generations"] == old["generations"] for new, old in zip(sampled[4:], found[4:], strict=True)]
    assert all(is_same or row["sampled"] for is_same, row in zip(same, sampled[4:], strict=True))
    assert not all(same)
