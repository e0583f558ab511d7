"""A target that is split, over processes or between memory and disk, verifies trees as a whole one does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from pretend_device import pretending
from targets import make_drafter, make_prompts, make_target
from transformers import AutoModelForCausalLM, PreTrainedModel

from transformers_gumiho import GumihoModel, attached
from transformers_gumiho.generation.verification.traits import drafter_device, input_device


SCRIPT = Path(__file__).parents[1] / "helpers" / "split_generation.py"


Split = tuple[PreTrainedModel, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    """The whole target, and what both processes of a split one got: split in its tensors, then in its layers."""
    target, folder = make_target(), tmp_path_factory.mktemp("split")
    target.save_pretrained(folder / "target")
    make_drafter(target).save_pretrained(folder / "own")
    make_drafter(target).save_pretrained(folder / "lent", save_embedding=False)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    process = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    first, second = (json.loads((folder / f"process_{rank}.json").read_text()) for rank in range(2))
    assert first == second
    return target, first


def test_tensor_parallel_target(split: Split) -> None:
    target, results = split[0], dict(split[1]["tensors"])
    assert results.pop("rows_of_a_process") == target.config.hidden_size // 2
    assert results.pop("shares") == [False, False], "what a process lacks a part of cannot be shared"
    assert results.pop("made") == target.get_input_embeddings().weight.tolist(), "the whole embedding"
    for result in results.values():
        assert result["drafted"] == result["plain"]
        assert result["tau"] > 1
    whole = target.generate(**make_prompts([6]), max_new_tokens=20, do_sample=False)
    assert results["greedy"]["plain"] == whole.tolist()


def test_pipeline_stages(split: Split) -> None:
    """Each process says so before any pass, and with an attached drafter it decodes plainly."""
    target, results = split[0], split[1]["stages"]
    plain = target.generate(**make_prompts([6]), max_new_tokens=8, do_sample=False).tolist()
    assert plain == results["plain"] == results["own attached"] == results["lent attached"]
    assert results["own"] == results["lent"]
    assert "split into pipeline stages" in results["own"]
    assert results["passes"] == 0


def test_an_offloaded_target(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """It gets the trees of the device that computes; a drafter that cannot read its embedding is left out."""
    whole = make_target()
    drafter = make_drafter(whole, num_assistant_tokens=None, branching_factor=None, break_even=None)
    drafter.save_pretrained(tmp_path, save_embedding=False)
    lent = GumihoModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    offloaded = cpu_offload(make_target(), execution_device=torch.device("cpu"))
    call = {**make_prompts([6]), "max_new_tokens": 30, "do_sample": False}
    plain = whole.generate(**call)
    for target in (whole, offloaded):
        output = target.generate(**call, assistant_model=drafter, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain)
        assert max(output.tree_sizes) == 12
    with pytest.raises(ValueError, match="token embedding is offloaded"):
        offloaded.generate(**call, assistant_model=lent)
    with attached(offloaded, lent):
        for _ in range(2):
            assert torch.equal(offloaded.generate(**call), plain)
    assert caplog.text.count("Decoding without the attached Gumiho drafter") == 1
    with pretending():
        there = make_target()
        add_hook_to_module(there.model, AlignDevicesHook(execution_device="cuda:1"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(there), "device", torch.device("meta"))
            assert input_device(there) == torch.device("cuda:1")


@pytest.mark.parametrize(("embedding", "head"), [("cpu", "cpu"), ("cpu", "disk"), ("disk", "cpu")])
def test_target_split_by_a_device_map(embedding: str, head: str, tmp_path: Path) -> None:
    whole = make_target()
    whole.save_pretrained(tmp_path / "target")
    device_map = {
        "model.embed_tokens": embedding, "model.layers.0": "cpu", "model.layers.1": "disk",
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
            plain = whole.generate(**prompts, max_new_tokens=20, do_sample=False)
            output = target.generate(
                **prompts, max_new_tokens=20, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
            )
            assert torch.equal(output.sequences, plain)
            assert max(output.accepted_lengths[0]) > 1
