"""`gumiho train`, run again: what continues, what is refused, what is loaded, and what several processes make."""

import gc
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from chat_target import make_chat_target, make_chat_tokenizer, write_chat_target
from commands import gumiho, interrupt, refuse
from hub_cache import write_to_hub_cache
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from training_data import DEMO_TARGET, write_jsonl
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, TrainerState
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from transformers_gumiho.training import FeatureDataset, GumihoTrainer, load_conversations, prepare_dataset
from transformers_gumiho.training.data.fingerprint import checkpoint_fingerprint
from transformers_gumiho.training.data.run_files import sole_writer
from transformers_gumiho.training.feature_cache import CacheWriter
from transformers_gumiho.training.recipe import plan
from transformers_gumiho.training.recipe.command import run_train_command
from transformers_gumiho.training.recipe.options import read_options
from transformers_gumiho.training.writing import row_file


DEMO_DRAFTER = DEMO_TARGET.parent / "gumiho"
SMALL = [
    "--use_cpu", "--per_device_train_batch_size", 2, "--num_eval_rows", 4, "--max_steps", 4,
    "--num_measured_prompts", 2, "--measured_new_tokens", 3, "--feature_noise", 0, "--logging_steps", 1,
]  # fmt: skip
WRITING = ["--max_new_tokens", 12, "--max_length", 256]
UP_TO_TRAINING = ["--stages", "write", "features", "train"]
STATES = ("features", "held_out")
PUBLISHED = [*UP_TO_TRAINING, "--recipe", "published", "--learning_rate", 0.02, "--warmup_steps", 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target that chats, and questions for it."""
    return write_chat_target(tmp_path_factory.mktemp("run"))


def command(folder: Path, name: str, *words: object) -> list[object]:
    common = ["train", "--target", folder / "target", "--data", folder / "questions.jsonl"]
    return [*common, "--output_dir", folder / name, *SMALL, *WRITING, *words]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A finished run, up to the training."""
    gumiho(*command(folder, "whole", *UP_TO_TRAINING))
    return folder / "whole"


@pytest.fixture(scope="module")
def published(folder: Path, whole: Path) -> Path:
    """A finished run with the published recipe, of whose checkpoints the last is not the best."""
    begin_from(whole, folder / "published", *STATES)
    gumiho(*command(folder, "published", *PUBLISHED))
    state = json.loads((folder / "published/work/published/trainer_state.json").read_text())
    assert not state["best_model_checkpoint"].endswith("checkpoint-4")
    return folder / "published"


def begin_from(whole: Path, folder: Path, *without: str) -> None:
    """Begins a run with the answers of another, and with its states."""
    shutil.copytree(whole / "work", folder / "work", ignore=shutil.ignore_patterns("serial", "heads", *without))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_drafter(first: Path, second: Path) -> None:
    expected, found = weights_of(first), weights_of(second)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning_rate", 0.02], "learning_rate (0.0003, now 0.02). Give these values again, begin anew with"),
        (["--draft_vocabulary_size", 300], "draft_vocabulary_size"),
        (["--per_device_train_batch_size", 4], "rows_per_step (2, now 4)"),
        (["--max_steps", 3], "max_steps (4, now 3)"),
        (["--transition_rank", 8], "transition_rank (64, now 8)"),
        (["--num_parallel_heads", 2], "num_parallel_heads (5, now 2)"),
        (["--max_length", 300], "max_length (256, now 300)"),
        (["--features_dtype", "float32"], "dtype (bfloat16, now float32)"),
        (["--max_new_tokens", 13], "max_new_tokens (12, now 13). Give these values again, or begin anew with"),
        (["--num_rows", 30], "data ("),
        (["--cache_features", "false"], "cache_features (true, now false)"),
        (["--dataloader_drop_last"], "dataloader_drop_last (False, now True)"),
        (["--metric_for_best_model", "eval_loss"], "metric_for_best_model (eval_expected_acceptance_length, now "),
        (["--save_strategy", "no"], "load_best_model_at_end (True, now False)"),
        (["--bf16"], "precision (no, now bf16)"),
    ],
)
def test_a_changed_option_is_refused_by_name(folder: Path, whole: Path, words: list[object], message: str) -> None:
    before = weights_of(whole)
    refuse(message, *command(folder, "whole", *UP_TO_TRAINING, *words))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(whole).items())


def change_generation_config(target: Path, **settings: Any) -> None:
    config = GenerationConfig.from_pretrained(target)
    config.update(**settings)
    config.save_pretrained(target)


def change_template(target: Path) -> None:
    tokenizer = make_chat_tokenizer()
    tokenizer.chat_template += "\n"
    tokenizer.save_pretrained(target)


def change_tokenizer(target: Path) -> None:
    tokenizer = make_chat_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(target)


@pytest.fixture(scope="module")
def measured(folder: Path, whole: Path) -> Path:
    """A finished run with settings that were measured, and a file of `gumiho data` beside it."""
    shutil.copytree(whole, folder / "measured")
    tune = [*command(folder, "measured"), "--stages", "tune"][1:]
    run_train_command([*map(str, tune)], {"tune": lambda *_: "measured"})
    gumiho("data", *tune[:4], "--output_file", folder / "measured/a.jsonl", "--max_new_tokens", 4, "--num_rows", 4)
    return folder / "measured"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (partial(change_generation_config, repetition_penalty=1.5), "generation_config ({"),
        (partial(change_generation_config, eos_token_id=5), "'eos_token_id': 5"),
        (partial(change_generation_config, temperature=0.5), "'temperature': 0.5"),
        (lambda target: make_chat_target(seed=2).save_pretrained(target), "target ("),
        (change_template, "template ("),
        (change_tokenizer, "tokenizer ("),
    ],
    ids=["penalty", "end", "temperature", "weights", "template", "tokenizer"],
)
def test_a_target_that_has_changed_is_noticed(
    folder: Path, measured: Path, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    """By what was made with it as it was: answers, states, and settings that were measured."""
    run, target = tmp_path / "run", tmp_path / "target"
    shutil.copytree(folder / "target", target)
    shutil.copytree(measured, run)
    change(target)
    words = ["--target", target, "--data", folder / "questions.jsonl"]
    refuse(message, "data", *words, "--output_file", run / "a.jsonl", "--max_new_tokens", 4, "--num_rows", 4)
    train = ["train", *words, "--output_dir", run, *SMALL, *WRITING]
    refuse(message, *train, *UP_TO_TRAINING)
    if message not in ("generation_config ({", "'eos_token_id': 5", "'temperature': 0.5"):
        refuse(message, *train, "--stages", "train")
    if message != "'temperature': 0.5":
        refuse(message, *train, "--stages", "tune")


def test_batches_that_are_all_dropped_are_refused(folder: Path, whole: Path) -> None:
    begin_from(whole, folder / "dropped")
    words = ["--dataloader_drop_last", "--per_device_train_batch_size", 64]
    refuse(" rows, as a batch has 64. Leave it out", *command(folder, "dropped", *UP_TO_TRAINING, *words))


def test_what_cannot_change_the_drafter_may_change(folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a run that is finished loads no target, nor looks at when files were written."""
    for path in (folder / "target").iterdir():
        os.utime(path)
    shutil.copytree(folder / "target", folder / "copy")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it loads the target"))
    words = ["--logging_steps", 3, "--eval_steps", 1, "--dataloader_num_workers", 1, "--save_total_limit", 3]
    words += ["--num_parallel_heads", 5]  # as it is by default
    words += ["--writing_batch_size", 3, "--endpoint", "http://127.0.0.1:9", "--save_strategy", "epoch"]
    output = gumiho(*command(folder, "whole", *UP_TO_TRAINING, *words, "--target", folder / "copy"))
    assert output.count("finished before") == 4  # two stages, and two phases of the third


def test_a_stage_begins_anew_where_it_is_asked_to(folder: Path, whole: Path) -> None:
    shutil.copytree(whole, folder / "anew")
    run = command(folder, "anew", *UP_TO_TRAINING, "--learning_rate", 0.02)
    refuse("--restart serial deletes work/serial (", *run, "--restart", "serial")
    assert (folder / "anew/work/serial/model.safetensors").exists()
    output = gumiho(*run, "--restart", "serial", "--yes")
    assert output.count("finished before") == 2
    assert "continues from" not in output
    assert "| `learning_rate` | 0.02 |" in (folder / "anew" / "README.md").read_text()
    begin_from(whole, folder / "fresh")
    gumiho(*command(folder, "fresh", *UP_TO_TRAINING, "--learning_rate", 0.02))
    assert_same_drafter(folder / "fresh", folder / "anew")
    refuse("--restart must be one of write, features, train, serial, heads, tune, evaluate", *run, "--restart", "bake")


def test_a_longer_run_trains_on_with_its_own_schedule(
    folder: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    From the last checkpoint, also if it is stopped before its first one; the learning rates after it are those of a
    run that was as long from the start.
    """
    run = command(folder, "grown", *PUBLISHED, "--lr_scheduler_type", "linear")
    begin_from(whole, folder / "grown", *STATES)
    assert "the schedule of the longer run" not in gumiho(*run, "--max_steps", 3)
    interrupt(GumihoTrainer, "train", 0, *run, "--max_steps", 6)
    assert "published: trains on, with the schedule of the longer run" in capsys.readouterr().out
    output = gumiho(*run, "--max_steps", 6)
    assert "published: continues from" in output
    assert "checkpoint-3" in output
    state = json.loads((folder / "grown/work/published/trainer_state.json").read_text())
    rates = [entry["learning_rate"] for entry in state["log_history"] if "learning_rate" in entry]
    falling = [0.02 * (1 - step / 3) for step in range(3)] + [0.02 * (1 - step / 6) for step in range(3, 6)]
    assert rates == pytest.approx(falling)


def test_a_phase_that_was_asked_to_stop_is_not_finished(
    folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As SIGTERM asks with `--enable_jit_checkpoint`: the trainer saves a checkpoint, and returns."""
    run = command(folder, "asked", *UP_TO_TRAINING, "--enable_jit_checkpoint", "--save_steps", 100)
    begin_from(whole, folder / "asked", *STATES)

    def stop(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            control.should_training_stop = True
            self.jit_manager.execute_jit_checkpoint()

    with monkeypatch.context() as patch:
        patch.setattr(JITCheckpointCallback, "on_step_end", stop)
        with pytest.raises(SystemExit, match="130"):
            gumiho(*run)
    assert "serial 1/2: stopped after step 3 of 4. Run the same command again" in capsys.readouterr().err
    assert "serial: continues from" in gumiho(*run)
    assert json.loads((folder / "asked/work/serial/trainer_state.json").read_text())["global_step"] == 4


def test_a_drafter_that_training_harms_stays_as_it_was(folder: Path, whole: Path) -> None:
    """It is evaluated first, and is the best one until another is better."""
    words = ["--features", whole / "work/features", "--drafter", whole, "--output_dir", folder / "harmed", *SMALL]
    output = gumiho(
        "train", *words, "--stages", "train", "--learning_rate", 0.1, "--warmup_steps", 0, "--max_steps", 1
    )
    assert re.search(r"train 1/1  step 0: agreement \d+% .*expected [\d.]+ tokens per pass\n", output)
    assert "train 1/1: nothing was better than the drafter to begin with, which stays" in output
    assert_same_drafter(folder / "harmed", whole)


def test_a_difference_that_is_forced_is_on_the_card(folder: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/model.safetensors").unlink()
    gumiho(*command(folder, str(tmp_path / "run"), *UP_TO_TRAINING, "--max_new_tokens", 13, "--force"))
    assert (
        "with other options than it began with: max_new_tokens (12, now 13)."
        in (tmp_path / "run/README.md").read_text()
    )
    assert_same_drafter(tmp_path / "run", whole)


def test_a_stopped_run_ends_in_the_same_drafter(folder: Path, whole: Path) -> None:
    """Stopped while it writes, at half a line, while it keeps states, and between, within and after the phases."""
    run, work = command(folder, "stopped", *UP_TO_TRAINING), folder / "stopped" / "work"
    interrupt(row_file, "append_rows", 1, *run)
    with (work / "answers.jsonl").open("a") as file:
        file.write('{"prompt": "half a')
    interrupt(CacheWriter, "save", 1, *run)
    interrupt(GumihoTrainer, "train", 1, *run)
    interrupt(GumihoTrainer, "training_step", 3, *run)
    assert (work / "heads" / "checkpoint-3").is_dir()
    interrupt(GumihoTrainer, "calibrate", 0, *run)
    # All of its options are in a file.
    options = yaml.safe_load((work / "resolved.yaml").read_text())
    gumiho("train", "--config", work / "resolved.yaml")
    assert yaml.safe_load((work / "resolved.yaml").read_text()) == options
    assert (work / "answers.jsonl").read_bytes() == (whole / "work" / "answers.jsonl").read_bytes()
    assert_same_drafter(whole, folder / "stopped")


def test_a_run_of_tokens_that_stops_in_its_second_epoch_ends_in_the_same_drafter(
    folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*PUBLISHED, "--max_steps", -1, "--num_train_epochs", 2, "--tokens_per_step", 256, "--save_steps", 1]
    runs = {name: command(folder, name, *words) for name in ("tokens", "stopped_tokens")}
    for name, run in runs.items():
        begin_from(whole, folder / name, *STATES)
        rows = run.index("--per_device_train_batch_size")
        del run[rows : rows + 2]
    gumiho(*runs["tokens"])
    state = json.loads((folder / "tokens/work/published/trainer_state.json").read_text())
    num_steps = state["max_steps"] // 2
    assert num_steps > 3
    interrupt(GumihoTrainer, "training_step", num_steps + 2, *runs["stopped_tokens"])
    assert "gumiho train: Interrupted. Run the same command again: it continues." in capsys.readouterr().err
    said: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("transformers.trainer_utils"), "callHandlers", said.append)
    assert "published: continues from" in gumiho(*runs["stopped_tokens"])
    assert not [entry for entry in said if "do not match" in entry.getMessage()]
    assert_same_drafter(folder / "stopped_tokens", folder / "tokens")


@pytest.mark.parametrize("error", [SafetensorError("I/O error: No space (os error 28)"), RuntimeError("pos 8 vs 9")])
def test_a_full_disk_is_told_and_the_run_goes_on(
    folder: Path, whole: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries have their own words for it. Within a phase, half a checkpoint stays."""
    name = f"full {type(error).__name__}"
    run, save = command(folder, name, *UP_TO_TRAINING), TrainerState.save_to_json
    begin_from(whole, folder / name)

    def fill(state: TrainerState, path: str) -> None:
        if state.global_step == 3:
            raise error
        save(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(TrainerState, "save_to_json", fill)
        if isinstance(error, RuntimeError):
            with pytest.raises(RuntimeError, match="pos 8 vs 9"):  # which may have any other reason
                gumiho(*run)
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
        refuse(f"The disk is full ({error}). Make room and run this again: it continues here", *run, "--ignore_plan")
    gumiho(*run)
    assert_same_drafter(whole, folder / name)


@pytest.mark.parametrize("how", ["gone", "cut"])
@pytest.mark.parametrize(
    "files",
    [
        ["model.safetensors"],
        ["work/features/shard-000-00000.safetensors", "work/held_out/shard-000-00000.safetensors"],
    ],
    ids=len,
)
def test_a_finished_run_makes_again_what_is_missing(
    folder: Path, whole: Path, files: list[str], how: str, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    for path in (tmp_path / "run" / file for file in files):
        data = path.read_bytes()
        path.unlink()
        if how == "cut":
            path.write_bytes(data[:40])
    run = command(folder, str(tmp_path / "run"), *UP_TO_TRAINING)
    if how == "cut" and len(files) == 1:  # what the user named is not replaced unasked
        refuse("`model.safetensors` of ", *run)
        path.write_bytes(data[:-1])
        refuse("run' is damaged: ", *run)
        path.unlink()
    gumiho(*run)
    assert_same_drafter(tmp_path / "run", whole)
    for name in ("features", "held_out"):
        found, expected = (FeatureDataset(path / "work" / name) for path in (tmp_path / "run", whole))
        for row, other in zip(found, expected, strict=True):
            assert all(torch.equal(row[name], other[name]) for name in other)
    (tmp_path / "run/work/serial/model.safetensors").write_bytes(b"cut")
    gumiho(*run)  # from the phase's best checkpoint
    assert_same_drafter(tmp_path / "run/work/serial", whole / "work/serial")


def test_another_recipe_in_the_same_folder_is_no_result_of_this_one(folder: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "both")
    gumiho(*command(folder, str(tmp_path / "both"), *UP_TO_TRAINING, "--recipe", "published", "--packing", "false"))
    assert weights_of(tmp_path / "both").keys() != weights_of(whole).keys()
    gumiho(*command(folder, str(tmp_path / "both"), *UP_TO_TRAINING))
    assert_same_drafter(tmp_path / "both", whole)


def test_a_folder_that_was_moved_goes_on_to_the_same_drafter(folder: Path, whole: Path, published: Path) -> None:
    """Also where the best checkpoint is one from before, and where all steps were taken and no result was kept."""
    begin_from(whole, folder / "to_move", *STATES)
    interrupt(GumihoTrainer, "training_step", 3, *command(folder, "to_move", *PUBLISHED))
    shutil.move(folder / "to_move", folder / "moved")
    interrupt(GumihoTrainer, "save_model", 1, *command(folder, "moved", *PUBLISHED))
    assert (folder / "moved/work/published/checkpoint-4").is_dir()
    assert not (folder / "moved/work/published/model.safetensors").exists()
    shutil.move(folder / "moved", folder / "moved_again")
    gumiho(*command(folder, "moved_again", *PUBLISHED))
    assert_same_drafter(folder / "moved_again", published)


def test_each_phase_begins_with_the_best_drafter_of_the_one_before(folder: Path, whole: Path) -> None:
    """And its own best is the drafter; of its checkpoints, the best and the last stay."""
    for phase in ("serial", "heads"):
        state = json.loads((whole / "work" / phase / "trainer_state.json").read_text())
        evaluations = [entry for entry in state["log_history"] if "eval_expected_acceptance_length" in entry]
        best = max(entry["eval_expected_acceptance_length"] for entry in evaluations)
        assert len(evaluations) >= 4
        assert state["best_metric"] == best
        checkpoint = Path(state["best_model_checkpoint"])
        kept = sorted((whole / "work" / phase).glob("checkpoint-*"))
        assert checkpoint in kept
        assert whole / "work" / phase / "checkpoint-4" in kept
        assert len(kept) <= 2
        assert_same_drafter(whole / "work" / phase, checkpoint)
    serial, heads = weights_of(whole / "work" / "serial"), weights_of(whole / "work" / "heads")
    frozen = [name for name in serial if not name.startswith(("mlp", "transition"))]
    assert frozen
    assert all(torch.equal(serial[name], heads[name]) for name in frozen)


def test_without_held_out_rows_the_last_checkpoint_is_the_drafter(folder: Path) -> None:
    words = ["--num_eval_rows", 0, "--recipe", "published", *UP_TO_TRAINING, "--logging_steps", 3]
    output = gumiho(*command(folder, "last", *words))
    assert re.findall(r"published 1/1  step (\d)/4  [\d.,]+ tokens/s  loss [\d.]+  \d+ min left", output) == ["3"]
    state = json.loads((folder / "last/work/published/trainer_state.json").read_text())
    assert not any("eval_loss" in entry for entry in state["log_history"])
    assert_same_drafter(folder / "last/work/published", folder / "last/work/published/checkpoint-4")


@pytest.mark.usefixtures("short_contests")
@pytest.mark.parametrize("cache_features", ["true", "false"])
def test_a_process_holds_at_most_one_target(
    folder: Path, cache_features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, alive, most = AutoModelForCausalLM.from_pretrained, [], []

    def load(*args: Any, **kwargs: Any) -> Any:
        model = real(*args, **kwargs)
        alive.append(weakref.ref(model))
        gc.collect()
        most.append(sum(reference() is not None for reference in alive))
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    gumiho(*command(folder, f"counted_{cache_features}", "--cache_features", cache_features, "--max_steps", 1))
    assert len(most) >= 3  # for the answers and states, to tune, to evaluate
    assert max(most) == 1


def test_two_processes_run_the_whole_command_as_one_does(folder: Path, whole: Path) -> None:
    """Started as a user starts them; the same rows in each step have the same losses."""
    launch = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
    ]  # fmt: skip
    words = [*command(folder, "together"), "--per_device_train_batch_size", 1]
    process = subprocess.run(
        [*launch, "-m", "transformers_gumiho.cli", *map(str, words)], capture_output=True, text=True, timeout=1800
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("[5/5] evaluate") == 1
    for phase in ("serial", "heads"):
        histories = [
            [entry.get("loss", entry.get("eval_loss")) for entry in state["log_history"][:8]]
            for run in (whole, folder / "together")
            for state in [json.loads((run / "work" / phase / "trainer_state.json").read_text())]
        ]
        assert histories[1] == pytest.approx(histories[0], rel=1e-3)
    assert "| gumiho |" in (folder / "together" / "README.md").read_text()


def test_a_target_has_one_fingerprint_wherever_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, a copy of it that is cut into other files, and a name on the Hub; other weights have another."""
    expected = checkpoint_fingerprint(folder / "target")
    shutil.copytree(folder / "target", tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    names = sorted(weights)
    (tmp_path / "other" / "model.safetensors").unlink()
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: weights[name] for name in part}, tmp_path / "other" / f"model-{number}.safetensors")
    assert checkpoint_fingerprint(tmp_path / "other") == expected
    shutil.copytree(folder / "target", tmp_path / "files")
    write_to_hub_cache(tmp_path / "hub", "me/target", (tmp_path / "files").iterdir())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert checkpoint_fingerprint("me/target") == expected
    changed = tmp_path / "other" / "model-1.safetensors"
    save_file({name: tensor + 0.5 for name, tensor in load_file(changed).items()}, changed)
    assert checkpoint_fingerprint(tmp_path / "other") != expected


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_written(
    folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By the disks and by free memory, with what helps; what was asked to start all the same starts."""
    run = command(folder, "huge", *UP_TO_TRAINING)
    usage = shutil.disk_usage(folder)._replace(free=9)
    with monkeypatch.context() as patch:
        patch.setattr(plan.shutil, "disk_usage", lambda _: usage)
        refuse("The run needs about", *run)
        here = tmp_path_factory.mktemp("datasets")
        patch.setattr(plan.datasets_config, "HF_DATASETS_CACHE", here)
        patch.setattr(plan, "_disk_of", str)
        patch.setattr(plan.shutil, "disk_usage", lambda path: usage._replace(free=9 if path == here else 10**12))
        refuse("The library `datasets` keeps prepared rows there: name another folder in HF_DATASETS_CACHE", *run)
        patch.setattr(plan, "_SHARED_MEMORY", here)
        patch.setattr(plan, "datasets_config", SimpleNamespace(HF_DATASETS_CACHE=folder))
        refuse("The 2 workers of the loader keep about", *run, "--dataloader_num_workers", 2)
    monkeypatch.setattr(plan.psutil, "virtual_memory", lambda: SimpleNamespace(available=10**5))
    refuse("stage 'write' needs about", *run)
    refuse("What helps: a smaller --writing_batch_size or --max_new_tokens, --device_map auto, or", *run)
    assert not list((folder / "huge" / "work").iterdir())
    output = gumiho(*run, "--ignore_plan", "--plan")
    assert "40 rows of data" in output
    assert "optimizer: adamw" in output
    cached = ["train", "--features", whole / "work" / "features", "--output_dir", folder / "of_cache", *SMALL]
    refuse("stage 'train' needs about", *cached)
    num_rows = len(FeatureDataset(whole / "work" / "features"))
    assert f"{num_rows} rows of data" in gumiho(*cached, "--ignore_plan", "--plan")


def test_a_plan_counts_the_tokens_of_all_turns_and_windows(folder: Path, tmp_path: Path) -> None:
    """A long text is cut into rows, and each question of a conversation is answered."""

    def counted(rows: list[dict[str, Any]], *words: object) -> tuple[int, int]:
        data = write_jsonl(tmp_path / "data.jsonl", rows)
        output = gumiho(*command(folder, "counted", "--plan", "--num_eval_rows", 0, "--data", data, *words))
        (found,) = re.findall(r"^([\d,]+) rows of data, ([\d,]+) tokens$", output, re.MULTILINE)
        return tuple(int(number.replace(",", "")) for number in found)

    texts = [{"text": "import os\n" * 300}, {"text": "import json\n" * 290}]
    data = load_conversations(write_jsonl(tmp_path / "texts.jsonl", texts))
    tokenizer, config = make_chat_tokenizer(), make_chat_target().config
    rows, report = prepare_dataset(data, tokenizer, config, max_length=256, packing=False)
    assert len(rows) > 4
    assert counted(texts, "--regenerate", "false") == (len(rows), report.num_tokens)
    turn = [{"role": "user", "content": "import what?"}, {"role": "assistant", "content": "os"}]
    (_, of_one), (_, of_three) = (counted([{"messages": turn * number}]) for number in (1, 3))
    assert of_three >= of_one + 2 * (len(tokenizer("import what?")["input_ids"]) + 12 // 2)


@pytest.mark.parametrize(
    ("words", "free", "told"),
    [
        ([], 10**12, "states: kept on the disk"),
        (["--recipe", "published", "--num_train_epochs", 1], 10**12, "runs in every step, as the data is passed once"),
        ([], 10**4, "runs in every step, as they need"),
        (["--stages", "features", "--recipe", "published", "--num_train_epochs", 1], 10**4, "kept on the disk"),
    ],
)
def test_states_are_kept_where_that_pays(
    folder: Path, words: list[object], free: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(folder)._replace(free=free)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _: usage)
    assert told in gumiho(*command(folder, "kept", "--plan", "--ignore_plan", *words))


def test_the_finished_drafter_alone_is_pushed(folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the drafter of a phase, nor what the run wrote in `work/`, nor a file with the user's token."""
    pushed = {}

    def upload_folder(self: HfApi, *, folder_path: Path, repo_id: str, ignore_patterns: list[str], **_: Any) -> None:
        files = [str(path.relative_to(folder_path)) for path in folder_path.rglob("*") if path.is_file()]
        pushed[repo_id] = {*filter_repo_objects(files, ignore_patterns=ignore_patterns)}

    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(HfApi, "auth_check", lambda self, name, write: None)
    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: SimpleNamespace(repo_id=f"me/{repo_id}"))
    begin_from(whole, folder / "pushed")
    monkeypatch.chdir(folder / "pushed")  # a card is called after the folder, whatever it is given as
    gumiho(*command(folder, ".", *UP_TO_TRAINING, "--push_to_hub", "--hub_token", "hf_secret", "--output_dir", "."))
    assert [*pushed] == ["me/pushed"]
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= pushed["me/pushed"]
    assert not [file for file in pushed["me/pushed"] if file.startswith("work")]
    assert not [file for file in pushed["me/pushed"] if b"hf_secret" in Path(file).read_bytes()]
    assert "\n# pushed\n" in Path("README.md").read_text()


def test_a_drafter_that_may_not_be_pushed_is_not_trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: Any, **__: Any) -> None:
        raise OSError("403 Forbidden: your token has no write permission")

    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: SimpleNamespace(repo_id="me/forbidden"))
    monkeypatch.setattr(HfApi, "auth_check", forbid)
    refuse("403 Forbidden: your token has", *command(folder, "forbidden", *UP_TO_TRAINING, "--push_to_hub"))
    assert not (folder / "forbidden").exists()


def test_a_folder_has_one_run_at_a_time(folder: Path, whole: Path) -> None:
    with sole_writer(whole / "work"):
        refuse("Another run is writing there", *command(folder, "whole", *UP_TO_TRAINING))


def test_a_file_gives_defaults_and_the_command_line_replaces_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("everywhere:\n  num_rows: 5\ncpu:\n  num_rows: 7\naccelerator:\n  num_rows: 9\n")
    run = command(folder, "configured", "--config", file, "--plan")
    assert "7 rows of data" in gumiho(*run)
    assert "6 rows of data" in gumiho(*run, "--num_rows", 6)
    file.write_text("everywhere:\n  learn_rate: 1\n")
    refuse("2", *run)
    assert "unrecognized arguments: --learn_rate=1" in capsys.readouterr().err
    file.write_text("phases:\n  all: {}\n")
    refuse("--recipe and the phases of --config are two recipes", *run, "--recipe", "published")
    file.write_text("gpu:\n  num_rows: 1\n")
    refuse("has 'gpu'. Its parts are everywhere, accelerator, cpu, phases, each with options", *run)
    for text, part in (("- num_rows", "\"['num_rows']\""), ("cpu: 7", "'cpu'"), ("cpu:\n- num_rows: 7\n", "'cpu'")):
        file.write_text(text)
        refuse(f"has {part}. Its parts are everywhere, accelerator, cpu", *run)
    as_yaml = "{num_rows: 4, cache_features: false, stages: train, chat_template_kwargs: {quick: true}}"
    file.write_text(f"cpu: {as_yaml}")
    output = gumiho(*run)
    assert "4 rows of data" in output
    assert "features " not in output


@pytest.mark.parametrize(
    ("words", "width", "expected"),
    [
        ([], 576, [1e-3, 1e-3]),
        ([], 4096, [2e-4, 2e-4]),
        (["--drafter", str(DEMO_DRAFTER)], 4096, [5e-5]),
        (["--learning_rate", "1"], 4096, [1, 1]),
        (["--use_cpu=true"], 4096, [3e-4, 4e-4]),
    ],
)
def test_the_learning_rate_follows_the_width_on_an_accelerator(
    words: list[str], width: int, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = read_options(["--output_dir", "x", "--use_cpu", *words], "")
    options.training.use_cpu = "--use_cpu=true" in words
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    options.fit_to_target(LlamaConfig(hidden_size=width))
    assert [phase.learning_rate for phase in options.phases.values()] == expected


def test_what_is_given_decides_the_other_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"everywhere": best | {"eval_strategy": "epoch", "save_strategy": "epoch"}}))
    words = ["--output_dir", str(tmp_path), "--use_cpu"]
    args = read_options([*words, "--config", str(file)], "").training
    assert {name: getattr(args, name) for name in best} == best
    assert args.greater_is_better is False, "the best loss is the lowest"
    args = read_options([*words, "--save_strategy", "epoch"], "").training
    assert args.load_best_model_at_end
    assert args.eval_strategy == "epoch"
    assert not read_options([*words, "--save_strategy", "no"], "").training.load_best_model_at_end
    with pytest.raises(SystemExit):
        gumiho("train", "--output_dir", tmp_path, "--save_steps", "x")
    assert "invalid float value: 'x'" in capsys.readouterr().err
