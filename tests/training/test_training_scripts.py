"""The commands of the examples, as a user runs them: from a dataset to a drafter that `generate()` uses."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from training_data import CHATML, DEMO_TARGET, MESSAGES, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_gumiho import GumihoModel


EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: object, fails: bool = False) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert bool(process.returncode) == fails, process.stderr
    return process.stdout + process.stderr


def call(script: str, *arguments: object) -> None:
    """Runs a script as `run` does, in this process, which has all libraries loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Conversations, and a chat template for the demo pair's target, which has none."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"messages": [*MESSAGES[:4], {"role": "assistant", "content": f"return self.path[{index}]\n" * 6}]}
        for index in range(40)
    ]
    write_jsonl(folder / "chats.jsonl", [*rows, "broken"])
    (folder / "template.jinja").write_text(CHATML)
    return {"dataset": folder / "chats.jsonl", "template": folder / "template.jinja"}


TRAINING = [
    "--use_cpu", "--bf16", "--per_device_train_batch_size", 2, "--learning_rate", 2e-3, "--warmup_steps", 2,
    "--logging_steps", 1,
]  # fmt: skip


def check_drafter(folder: Path) -> None:
    """The folder holds a drafter with its tokenizer, in the target's precision, that drafts for it."""
    target = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    drafter = GumihoModel.from_pretrained(folder)
    assert drafter.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("def __init__(self", return_tensors="pt")["input_ids"]
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=drafter), plain)
    card = (folder / "README.md").read_text()
    assert f"\n# {folder.name}\n" in card, "a folder's place means nothing to others"
    assert "expected_acceptance_length" in card


def test_one_command_trains_a_drafter_and_goes_on_when_run_again(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "train_gumiho.py", "--target_model", DEMO_TARGET, "--dataset_name", data["dataset"], "--chat_template",
        data["template"], "--output_dir", tmp_path / "gumiho", "--max_length", 256, *TRAINING, "--save_steps", 4,
        "--acceptance_steps", 8, "--num_acceptance_prompts", 2, "--acceptance_max_new_tokens", 16,
    ]  # fmt: skip
    output = run(*command, "--max_steps", 4)
    assert "1 skipped" in output
    assert "is not JSON" in output
    check_drafter(tmp_path / "gumiho")
    call(*command, "--max_steps", 8)
    output = capsys.readouterr().out
    assert "going on from" in output
    assert "checkpoint-4" in output
    state = json.loads((tmp_path / "gumiho" / "checkpoint-8" / "trainer_state.json").read_text())
    history = {entry["step"]: entry for entry in state["log_history"] if "loss" in entry}
    assert list(history) == list(range(1, 9))
    assert history[8]["loss"] < history[1]["loss"]
    assert any("tau" in entry for entry in state["log_history"])
    check_drafter(tmp_path / "gumiho")


def test_features_are_extracted_once_and_trained_on_without_the_target(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--target_model", DEMO_TARGET, "--dataset_name", data["dataset"], "--chat_template", data["template"]]
    layers = ["--target_layer_ids", 3, -1]
    extraction = ["extract_features.py", *common, "--output_dir", tmp_path / "features", "--max_length", 256, *layers]
    output = run(*extraction)
    assert "the features take 0.00 GB" in output
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("*")}
    call(*extraction)  # nothing is left to do
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("*")} == before
    call(
        "train_gumiho.py", "--features_dir", tmp_path / "features", "--output_dir", tmp_path / "gumiho", *TRAINING,
        "--max_steps", 3, *layers,
    )  # fmt: skip
    check_drafter(tmp_path / "gumiho")
    drafter = GumihoModel.from_pretrained(tmp_path / "gumiho")
    assert drafter.config.target_layer_ids == [3, 19]
    assert f"draft temperatures: {drafter.generation_config.draft_temperature}" in capsys.readouterr().out
    # One part after the other, each from where the one before it has got.
    serial, whole = tmp_path / "serial", tmp_path / "whole"
    common = ["train_gumiho.py", "--features_dir", tmp_path / "features", *TRAINING, "--max_steps", 2]
    call(*common, "--output_dir", serial, "--linear_start", "--train_only", "serial", *layers)
    call(*common, "--output_dir", whole, "--drafter", serial, "--train_only", "parallel")
    check_drafter(whole)
    before, after = (GumihoModel.from_pretrained(folder).state_dict() for folder in (serial, whole))
    changed = {name.split(".")[0] for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {"mlp"}


def test_the_targets_own_answers_are_a_dataset(data: dict[str, Path], tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": f"def f{index}(self):\n"} for index in range(20)])
    run(
        "regenerate_data.py", "--target_model", DEMO_TARGET, "--dataset_name", texts, "--output_file",
        tmp_path / "answers.jsonl", "--max_length", 40, "--temperature", 1.0,
    )  # fmt: skip
    call(
        "train_gumiho.py", "--target_model", DEMO_TARGET, "--dataset_name", tmp_path / "answers.jsonl", "--streaming",
        "--num_eval_rows", 4, "--output_dir", tmp_path / "gumiho", *TRAINING, "--max_steps", 2, "--max_length", 128,
        "--drafter", EXAMPLES / "demo_pair" / "gumiho", "--packing", "false",
    )  # fmt: skip
    check_drafter(tmp_path / "gumiho")


def test_a_draft_model_for_assisted_generation_is_trained_on_the_targets_texts(tmp_path: Path) -> None:
    shutil.copytree(DEMO_TARGET, tmp_path / "pair" / "target")
    run(
        "demo_pair/train_draft_model.py", "--output_dir", tmp_path / "pair", "--work_dir", tmp_path / "work",
        "--library", Path(json.__file__).parent, "--held_out_one_in", 2, "--draft_steps", 3, "--generated_rows",
        4, "--generated_batch_size", 2, "--eval_rows", 4, "--drafter_batch_size", 2, "--drafter_sequence_length", 80,
    )  # fmt: skip
    target = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    draft_model = AutoModelForCausalLM.from_pretrained(tmp_path / "pair" / "draft_model")
    assert draft_model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "pair" / "draft_model")
    ids = tokenizer("def __init__(self", return_tensors="pt")["input_ids"]
    plain = target.generate(ids, max_new_tokens=16, do_sample=False)
    assisted = target.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=draft_model.float())
    assert torch.equal(assisted, plain)


def test_what_is_missing_ends_the_program_with_a_line(tmp_path: Path) -> None:
    arguments = ["--target_model", DEMO_TARGET, "--output_dir", tmp_path, "--dataset_name", "missing.jsonl"]
    output = run("train_gumiho.py", *arguments, fails=True)
    assert "There is no file 'missing.jsonl'" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give the target with --target_model and the data with --dataset_name, or --features_dir"),
        (["--features_dir", "."], "is no feature cache"),
        (["--features_dir", ".", "--dataset_name", "x", "--streaming"], "leave --dataset_name, --streaming out"),
        (["--dataset_name", "x", "--lora_rank", "4"], "give it with --drafter"),
        (["--dataset_name", "x", "--train_only", "parallel"], "a serial head that is there: give its drafter"),
        pytest.param(
            ["--bf16"], "You need to assign use_cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="GPU")
        ),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        call("train_gumiho.py", "--target_model", DEMO_TARGET, "--output_dir", tmp_path, *arguments)


@pytest.mark.parametrize("name", ["fsdp", "zero3"])
def test_launch_configs_are_what_accelerate_reads(name: str) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    path = EXAMPLES / "accelerate" / f"{name}.yaml"
    config = config_args.load_config_from_file(str(path))
    assert config.num_processes == 8
    assert config.distributed_type == {"fsdp": "FSDP", "zero3": "DEEPSPEED"}[name]
    assert config.to_dict()["mixed_precision"] == yaml.safe_load(path.read_text())["mixed_precision"] == "bf16"
