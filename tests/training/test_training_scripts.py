"""The commands of the examples, as a user runs them: from a dataset to a drafter that `generate()` uses."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_draft_model_for_assisted_generation_is_trained_on_the_targets_texts(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "pair" / "target")
    command = [
        sys.executable, EXAMPLES / "demo_pair" / "train_draft_model.py", "--output_dir", tmp_path / "pair",
        "--work_dir", tmp_path / "work", "--library", Path(json.__file__).parent, "--held_out_one_in", 2,
        "--draft_steps", 3, "--generated_rows", 4, "--generated_batch_size", 2, "--eval_rows", 4,
        "--drafter_batch_size", 2, "--drafter_sequence_length", 80,
    ]  # fmt: skip
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    target = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    draft_model = AutoModelForCausalLM.from_pretrained(tmp_path / "pair" / "draft_model")
    assert draft_model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "pair" / "draft_model")
    ids = tokenizer("def __init__(self", return_tensors="pt")["input_ids"]
    plain = target.generate(ids, max_new_tokens=16, do_sample=False)
    assisted = target.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=draft_model.float())
    assert torch.equal(assisted, plain)


@pytest.mark.parametrize("name", ["fsdp", "zero3"])
def test_launch_configs_are_what_accelerate_reads(name: str) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    path = EXAMPLES / "accelerate" / f"{name}.yaml"
    config = config_args.load_config_from_file(str(path))
    assert config.num_processes == 8
    assert config.distributed_type == {"fsdp": "FSDP", "zero3": "DEEPSPEED"}[name]
    assert config.to_dict()["mixed_precision"] == yaml.safe_load(path.read_text())["mixed_precision"] == "bf16"
