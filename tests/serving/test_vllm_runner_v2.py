"""vLLM's model runner V2 drafts what V1 does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from vllm_engine import DEMO_DRAFTER, DEMO_TARGET
from vllm_pairs import UNSURE_FIELDS, exact_distribution, make_gumiho, p_value, transformers_chains, write_target

from transformers_gumiho import GumihoModel


PROGRAM = Path(__file__).parents[1] / "helpers" / "vllm_interpreted.py"


def run(target: Path, drafter: Path, num_tokens: int, **settings: Any) -> dict[str, Any]:
    # Triton decides when it is imported whether it interprets.
    command = [sys.executable, PROGRAM, target, drafter, str(num_tokens), json.dumps(settings)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def test_texts_and_chains_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    target = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    gumiho = GumihoModel.from_pretrained(DEMO_DRAFTER, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(DEMO_TARGET)("def __init__(self, ", return_tensors="pt").input_ids
    text = target.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None)[0, prompt.shape[1] :]
    (drafted,) = transformers_chains(target, gumiho, prompt.tolist(), 7, 16, monkeypatch)
    found = run(DEMO_TARGET, DEMO_DRAFTER, 7, prompts=prompt.tolist(), max_tokens=16)
    assert found["class"] == "GumihoSpeculator"
    assert found["texts"] == [text.tolist()]
    assert [chains[0] for chains in found["steps"]][: len(drafted)] == drafted


def test_sampled_texts_have_the_distribution_of_the_target(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", LlamaConfig(**UNSURE_FIELDS, vocab_size=6))
    make_gumiho(target).save_pretrained(tmp_path / "gumiho")
    found = run(
        tmp_path / "target", tmp_path / "gumiho", 4, prompts=[[1, 2, 3]] * 64, max_tokens=3, rounds=8,
        speculative={"draft_sample_method": "probabilistic"}, sampling={"temperature": 1.0, "detokenize": False},
        engine={"skip_tokenizer_init": True, "max_num_seqs": 64, "max_num_batched_tokens": 512},
    )  # fmt: skip
    assert len(found["texts"]) == 512
    assert p_value(found["texts"], exact_distribution(target, [1, 2, 3], 1.0, 1.0)) > 1e-4
