"""A target that is split, over processes or between memory and disk, verifies trees as a whole one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from targets import make_drafter, make_prompts, make_target
from transformers import AutoModelForCausalLM

from transformers_gumiho.verification.placement import drafter_device


SCRIPT = Path(__file__).parents[1] / "helpers" / "split_generation.py"


def test_tensor_parallel_target(tmp_path: Path) -> None:
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    process = subprocess.run(
        [*command, str(tmp_path)], env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    first, second = (json.loads((tmp_path / f"process_{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first.pop("rows_of_a_process") == target.config.hidden_size // 2
    for result in first.values():
        assert result["drafted"] == result["plain"]
        assert result["tau"] > 1
    whole = target.generate(**make_prompts([6]), max_new_tokens=40, do_sample=False)
    assert first["greedy"]["plain"] == whole.tolist()


@pytest.mark.parametrize(("embedding", "head"), [("cpu", "cpu"), ("cpu", "disk"), ("disk", "cpu")])
def test_target_split_by_a_device_map(embedding: str, head: str, tmp_path: Path) -> None:
    whole = make_target()
    whole.save_pretrained(tmp_path / "target")
    device_map = {
        "model.embed_tokens": embedding, "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu",
        "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": head,
    }  # fmt: skip
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", dtype=torch.float64, device_map=device_map, offload_folder=tmp_path / "offloaded"
    )
    assert target.hf_device_map == device_map
    assert drafter_device(target).type == "cpu"
    for settings in ({}, {"draft_vocabulary": [0, 1, 2, 3, 4, 5]}):
        drafter = make_drafter(whole, **settings)
        for lengths in ([6], [6, 3]):
            prompts = make_prompts(lengths)
            plain = whole.generate(**prompts, max_new_tokens=40, do_sample=False)
            output = target.generate(
                **prompts, max_new_tokens=40, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
            )
            assert torch.equal(output.sequences, plain)
            assert max(output.accepted_lengths[0]) > 1
