"""Two processes train the drafter that one trains, started as a user starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed_training import train
from safetensors.torch import load_file

from transformers_gumiho import GumihoModel


SCRIPT = Path(__file__).parents[1] / "helpers" / "distributed_training.py"
LAUNCH = [
    sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
]  # fmt: skip
ZERO3 = Path(__file__).parents[2] / "examples" / "accelerate" / "zero3.yaml"
MODES = {
    "ddp": ["--multi_gpu"],
    "fsdp": [
        "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
        "--fsdp_state_dict_type", "SHARDED_STATE_DICT",  # which is gathered
    ],
    "zero3": ["--config_file", str(ZERO3)],
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process with batches of four."""
    folder = tmp_path_factory.mktemp("alone")
    train("alone", folder)
    train("alone_muon", folder)
    train("alone_tokens", folder)
    return folder / "alone"


@pytest.fixture(scope="module", params=list(MODES))
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Two processes, which have several runs, one after the other."""
    if request.param == "zero3":
        pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp(request.param)
    further = {"ddp": ["streamed", "muon", "tokens"], "fsdp": ["muon", "tokens"], "zero3": ["tokens"]}
    runs = ["tried", "whole", "resumed", *further[request.param]]
    command = [*LAUNCH, *MODES[request.param], str(SCRIPT), str(folder), *runs]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return request.param, folder


def curve_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "curve.json").read_text())


def test_two_processes_train_as_one_does(together: tuple[str, Path], alone: Path) -> None:
    mode, folder = together
    curve = curve_of(folder / "whole")
    assert curve[-1].pop("sharded") == (mode != "ddp")
    for ours, theirs in zip(curve, curve_of(alone), strict=True):
        assert ours == pytest.approx({k: v for k, v in theirs.items() if k != "sharded"}, rel=1e-4)
    weights = load_file(folder / "whole" / "final" / "model.safetensors")
    for name, tensor in load_file(alone / "final" / "model.safetensors").items():
        assert weights[name].shape == tensor.shape
        assert (weights[name] - tensor).abs().max() < 1e-4
    GumihoModel.from_pretrained(folder / "whole" / "final")

    # A run that ended after its first checkpoint goes on to the same drafter.
    resumed = curve_of(folder / "resumed")
    assert resumed[-1].pop("sharded") == (mode != "ddp")
    assert resumed[-1] == pytest.approx(curve[-1], rel=1e-4)


def test_two_processes_agree_on_what_fits(together: tuple[str, Path]) -> None:
    """Where both fail, and where one does. What they train afterwards is what one trains."""
    assert [json.loads((together[1] / f"tried-{rank}.json").read_text()) for rank in range(2)] == [[16, 3]] * 2


@pytest.mark.parametrize("together", ["ddp", "fsdp"], indirect=True)
def test_two_processes_train_with_muon_as_one_does(together: tuple[str, Path], alone: Path) -> None:
    ours, theirs = curve_of(together[1] / "muon"), curve_of(alone.with_name("alone_muon"))
    for step, of_one in zip(ours[:-1], theirs[:-1], strict=True):
        assert step == pytest.approx(of_one, rel=1e-2)  # Muon computes in bfloat16
    assert ours[-2]["loss"] != pytest.approx(curve_of(alone)[-2]["loss"], rel=2e-2)  # that of AdamW


@pytest.mark.parametrize("together", ["ddp"], indirect=True)
def test_two_processes_share_a_stream(together: tuple[str, Path], alone: Path) -> None:
    assert curve_of(together[1] / "streamed")[-1] == pytest.approx(curve_of(alone)[-1], rel=1e-4)


def test_two_processes_share_the_tokens_of_a_step(together: tuple[str, Path], alone: Path) -> None:
    curves = [curve_of(folder) for folder in (together[1] / "tokens", alone.with_name("alone_tokens"))]
    for ours, theirs in zip(*curves, strict=True):
        ours.pop("sharded", None), theirs.pop("sharded", None)
        assert ours == pytest.approx(theirs, rel=1e-4)
