"""Two processes train the drafter that one trains, started as a user starts them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from transformers_gumiho import GumihoModel


SCRIPT = Path(__file__).parents[1] / "helpers" / "distributed_training.py"
LAUNCH = [
    sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
]  # fmt: skip
MODES = {
    "ddp": ["--multi_gpu"],
    "fsdp": [
        "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
        "--fsdp_state_dict_type", "FULL_STATE_DICT",
    ],
}  # fmt: skip


def run(command: list[str], folder: Path, *arguments: str) -> list[dict[str, Any]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [*command, str(SCRIPT), str(folder), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    return json.loads((folder / "curve.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """One process with batches of four."""
    folder = tmp_path_factory.mktemp("alone")
    return run([sys.executable], folder, "4"), folder


@pytest.mark.parametrize("mode", list(MODES))
def test_two_processes_train_as_one_does(mode: str, alone: tuple[list[dict[str, Any]], Path], tmp_path: Path) -> None:
    expected, folder = alone
    launch = [*LAUNCH, *MODES[mode]]
    # Batches of one, two of them to a step, in each of two processes.
    curve = run(launch, tmp_path, "1")
    assert curve[-1].pop("sharded") == (mode == "fsdp")
    for ours, theirs in zip(curve, expected, strict=True):
        assert ours == pytest.approx({k: v for k, v in theirs.items() if k != "sharded"}, rel=1e-4)
    weights = load_file(tmp_path / "final" / "model.safetensors")
    for name, tensor in load_file(folder / "final" / "model.safetensors").items():
        assert weights[name].shape == tensor.shape
        assert (weights[name] - tensor).abs().max() < 1e-4
    GumihoModel.from_pretrained(tmp_path / "final")

    # A run that ended after its first checkpoint goes on to the same drafter.
    shutil.rmtree(tmp_path / "checkpoint-6")
    resumed = run(launch, tmp_path, "1", "resume")
    resumed[-1].pop("sharded")
    assert resumed[-1] == pytest.approx(curve[-1], rel=1e-4)


def test_two_processes_share_a_stream(alone: tuple[list[dict[str, Any]], Path], tmp_path: Path) -> None:
    curve = run([*LAUNCH, *MODES["ddp"]], tmp_path, "2", "stream")
    assert curve[-1] == pytest.approx(alone[0][-1], rel=1e-4)
