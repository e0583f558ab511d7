"""`gumiho train` and `gumiho data`, as a user runs them: from nothing to a drafter that `generate()` uses."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from commands import gumiho, refuse
from safetensors.torch import load_file
from training_data import CHATML, DEMO_TARGET, MESSAGES, write_jsonl
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from transformers_gumiho import GumihoModel, record
from transformers_gumiho.tools.measuring.prompts import read_prompts
from transformers_gumiho.training import FeatureDataset, GumihoTrainingArguments, load_conversations
from transformers_gumiho.training.recipe import arguments as arguments_of_recipe
from transformers_gumiho.training.recipe import phases, target
from transformers_gumiho.training.recipe.arguments import RecipeArguments, WritingArguments
from transformers_gumiho.training.recipe.stages import Run


DEMO_DRAFTER = DEMO_TARGET.parent / "gumiho"
TOY = [
    "--use_cpu", "--max_steps", 4, "--save_steps", 2, "--logging_steps", 1, "--per_device_train_batch_size", 2,
    "--num_eval_rows", 4, "--num_measured_prompts", 3, "--measured_new_tokens", 3,
]  # fmt: skip
WRITING = ["--max_new_tokens", 16, "--writing_batch_size", 16]
UP_TO_TRAINING = ["--stages", "write", "features", "train"]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Questions without answers; the demo pair's target has no chat template, and continues them."""
    rows = [{"prompt": f"def f{index}(self, x):\n    "} for index in range(40)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "questions.jsonl", rows)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Conversations, one broken line, and a chat template for the demo pair's target."""
    folder = tmp_path_factory.mktemp("chats")
    answers = [{"role": "assistant", "content": f"return self.path[{index}]\n" * 6} for index in range(40)]
    questions = [{"role": "user", "content": f"import what, at {index}?"} for index in range(40)]
    rows = [{"messages": [MESSAGES[0], *pair]} for pair in zip(questions, answers, strict=True)]
    (folder / "template.jinja").write_text(CHATML)
    return {
        "data": write_jsonl(folder / "chats.jsonl", [*rows, "broken"]), "template": str(folder / "template.jinja")
    }  # fmt: skip


def check_drafter(folder: Path, of_target: Path) -> GumihoModel:
    """The folder holds a drafter with its tokenizer and card, in the target's precision, that drafts for it."""
    target = AutoModelForCausalLM.from_pretrained(of_target, dtype=torch.float32)
    drafter = GumihoModel.from_pretrained(folder)
    assert drafter.dtype == torch.bfloat16
    ids = AutoTokenizer.from_pretrained(folder)("def __init__(self", return_tensors="pt")["input_ids"]
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=drafter), plain)
    card = (folder / "README.md").read_text()
    assert f"\n# {folder.name}\n" in card, "a folder's place means nothing to others"
    assert "expected_acceptance_length" in card
    return drafter


@pytest.mark.usefixtures("short_contests")
def test_one_command_makes_a_drafter_from_nothing(
    small: Path, questions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--target", small, "--data", questions, "--output_dir", tmp_path / "gumiho", *TOY, *WRITING]
    gumiho(*command)
    output = capsys.readouterr()
    plan, *_ = output.out.partition("[1/5]")
    for stage in ("write", "features", "train", "tune", "evaluate", "all"):
        assert re.search(rf"^{stage} +[\d.]+ [GM]B +[\d.]+ [GM]B$", plan, re.MULTILINE)
    for bar in ("target answers", "extracting features", "tuning:", "decoding:"):
        assert bar in output.err
    assert re.search(r"serial 1/2  step 2/4  .*tokens/s  ", output.out)
    assert re.search(r"serial 1/2  step 2: agreement .*expected [\d.]+ tokens per pass", output.out)
    # The output is no terminal here.
    assert not re.search("[\r\x1b]", output.out + output.err)
    of_training = re.findall("^(?:serial|heads) .*$", output.out, flags=re.MULTILINE)
    assert max(map(len, [*of_training, *output.err.splitlines()])) <= 100
    assert "heads 2/2  step 4/4" in output.out
    drafter = check_drafter(tmp_path / "gumiho", small)
    assert drafter.config.transition_rank == 64
    assert drafter.generation_config.break_even is not None  # it was tuned for this machine
    serial = GumihoModel.from_pretrained(tmp_path / "gumiho" / "work" / "serial").generation_config
    assert len(serial.draft_vocabulary) == drafter.config.get_text_config().vocab_size // 4
    card = (tmp_path / "gumiho" / "README.md").read_text()
    for mode in ("plain", "prompt lookup", "gumiho"):
        assert f"| {mode} |" in card
    assert "In 2 phases: serial, heads. The table is that of the last one." in card
    steps = {
        phase: json.loads((tmp_path / "gumiho/work" / phase / "checkpoint-4/trainer_state.json").read_text())
        for phase in ("serial", "heads")
    }
    begun = {phase: state["log_history"][0] for phase, state in steps.items()}
    assert all(entry["step"] == 0 and "eval_loss" in entry for entry in begun.values())
    assert "serial_ce" in steps["serial"]["log_history"][1]
    assert "parallel_0_ce" in steps["heads"]["log_history"][1]

    # Run again, it has nothing left to do.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "gumiho").glob("*.*")}
    assert gumiho(*command).count("finished before") == 6  # the training has two phases
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "gumiho").glob("*.*")} == before


def test_answers_of_a_dataset_are_trained_on_while_the_target_runs(
    small: Path, chats: dict[str, str], tmp_path: Path
) -> None:
    """By the published recipe, which is one training, of all parts at once."""
    command = [
        "train", "--target", small, "--data", chats["data"], "--chat_template", chats["template"],
        "--regenerate", "false", "--cache_features", "false", "--output_dir", tmp_path / "gumiho", *TOY,
        "--stages", "train", "--recipe", "published", "--eval_strategy", "steps",
        "--eval_steps", 2, "--max_length", 256,
    ]  # fmt: skip
    output = gumiho(*command)
    assert "40 of 41 rows can be used" in output
    assert "is not JSON" in output
    output = gumiho(*command, "--max_steps", 6)
    assert "continues from" in output
    assert "checkpoint-4" in output
    state = json.loads((tmp_path / "gumiho/work/published/checkpoint-6/trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    first = next(entry for entry in state["log_history"] if "loss" in entry)
    assert {"serial_feature", "serial_ce", "parallel_4_feature"} <= set(first)
    drafter = check_drafter(tmp_path / "gumiho", small)
    assert drafter.config.transition_rank == 0
    assert drafter.generation_config.draft_vocabulary is None


def test_stages_run_alone_and_parts_are_trained_alone(small: Path, questions: str, tmp_path: Path) -> None:
    layers = ["--target_layer_ids", 0, -1]
    first = [
        "train", "--target", small, "--data", questions, "--output_dir", tmp_path / "first", *TOY, *WRITING,
        *layers, "--stages",
    ]  # fmt: skip
    refuse("holds no answers yet. Add write to --stages", *first, "train")
    gumiho(*first, "write", "features")
    refuse("dtype (bfloat16, now float32). Give these values again", *first, "train", "--features_dtype", "float32")
    cache = tmp_path / "first" / "work" / "features"
    assert len(FeatureDataset(cache)) == 36
    assert not (tmp_path / "first" / "model.safetensors").exists()
    serial, whole = tmp_path / "serial", tmp_path / "whole"
    common = ["train", *TOY, "--stages", "train", "--max_steps", 2, "--learning_rate", 2e-3, "--features", cache]
    gumiho(*common, "--output_dir", serial, "--linear_start", "--train_only", "serial", *layers)
    last = [*common, "--output_dir", whole, "--drafter", serial, "--train_only", "parallel", "--warmup_steps", 0]
    gumiho(*last)
    refuse("learning_rate (0.002, now 0.003)", *last, "--learning_rate", 3e-3)
    assert check_drafter(whole, small).config.target_layer_ids == [0, 1]
    before, after = (load_file(folder / "model.safetensors") for folder in (serial, whole))
    changed = {name.split(".")[0] for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {"mlp", "transition"}
    target = AutoModelForCausalLM.from_pretrained(small, dtype="auto")
    with record(target, tmp_path / "recorded"):
        drafter = GumihoModel.from_pretrained(whole)
        target.generate(torch.arange(60, 100).view(4, 10), assistant_model=drafter, max_new_tokens=8, do_sample=False)
    gumiho(*common, tmp_path / "recorded", "--output_dir", tmp_path / "both", "--drafter", serial)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give the target with --target, and the data with --data"),
        (["--target", DEMO_TARGET, "--data", "missing.jsonl"], "There is no file 'missing.jsonl'"),
        (["--features", "."], "is no feature cache"),
        (["--features", ".", "--data", "x"], "--data has no effect with --features, which holds prepared data"),
        (["--features", ".", "--regenerate", "true"], "--regenerate has no effect with --features"),
        (["--target", "t", "--data", "none", "--regenerate", "false"], "--regenerate has no effect with --data none"),
        (["--target", "t", "--data", "none", "--num_rows", "5"], "no effect with --data none: use --num_prompts"),
        (["--target", "t", "--data", "x", "--openings", "o"], "--openings has no effect without --data none"),
        (["--target", "./t", "--data", "x"], "There is no folder './t'"),
        (["--target", "t", "--data", "x", "--drafter", "./d"], "There is no folder './d'"),
        (["--target", "t", "--data", "x", "--output_dir", "t"], "would replace the target in 't'. Name"),
        (["--target", "t", "--data", "x", "--drafter", "d", "--output_dir", "e/../d"], "would replace the drafter in"),
        (["--target", "t", "--data", "x", "--output_dir", __file__], "Not a directory"),
        (["--target", "t", "--data", "x", "--save_only_model"], "leave --save_only_model out"),
        (["--target", "t", "--data", "x", "--report_to", "mlflow"], "install it with `pip install mlflow`"),
        (["--target", "t", "--data", "x", "--optim", "grokadamw"], "Please install grokadamw"),
        (["--target", "t", "--data", "x", "--measured_new_tokens", "0"], "--measured_new_tokens must be at least 1"),
        (["--target", "t", "--data", "x", "--num_measured_prompts", "-1"], "--num_measured_prompts must be"),
        (["--target", "t", "--data", "x", "--num_eval_rows", "nan"], "--num_eval_rows must be at least 0, got nan"),
        (["--target", DEMO_TARGET, "--data", __file__, "--chat_template", CHATML * 9], "File name too long"),
        (["--target", "t", "--data", "x", "--lora_rank", "4"], "LoraConfig(r=4, target_modules=["),
        (["--target", "t", "--data", "x", "--train_only", "parallel"], "serial head: give it with --drafter"),
        (["--target", "t", "--data", "x", "--resume_from_checkpoint", "true"], "continues from its newest checkpoint"),
        (["--target", "t", "--data", "x", "--stages", "bake"], "There is no stage 'bake'"),
        (["--tokens_per_step", "9", "--per_device_train_batch_size", "2"], "counts rows, --tokens_per_step tokens."),
        (["--target", "t", "--data", "x", "--gradient_accumulation_steps", "2"], "counts batches of rows, and"),
        (["--target", DEMO_TARGET, "--data", "none"], "has no chat template"),
        (["--target", "t", "--data", "x", "--use_cpu", "--seed", "-1"], "--seed must be from 0 to 4294967295, got -1"),
        (["--target", "t", "--data", "x", "--use_cpu", "--data_seed", "1" * 30], "--data_seed must be from 0 to "),
        (["--target", "t", "--data", "x", "--chat_template_kwargs", "yes"], "must be a JSON object, got 'yes'"),
        pytest.param(
            ["--features", ".", "--bf16"], "You need to assign use_cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="GPU"),
        ),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arguments_of_recipe, "get_available_reporting_integrations", lambda: ["wandb"])
    refuse(message, "train", "--output_dir", tmp_path, *arguments)


def test_options_are_not_abbreviated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The defaults depend on which are given."""
    with pytest.raises(SystemExit, match=r"^2$"):
        gumiho("train", "--output_dir", tmp_path, "--conf", tmp_path / "mine.yaml")
    assert re.match(r"usage: gumiho train (.|\n)*error: unrecognized arguments: --conf ", capsys.readouterr().err)


def test_each_process_loads_its_target_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its index, as transformers loads in threads."""
    monkeypatch.setattr(target, "processes", lambda: SimpleNamespace(device=torch.device("cuda", 1)))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load := Mock())
    target.load_target(WritingArguments(target=str(DEMO_TARGET), data="none"))
    assert load.call_args.kwargs["device_map"] == torch.device("cuda", 1)


def test_a_run_goes_on_without_held_out_rows_or_prompts_that_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AutoConfig.from_pretrained(DEMO_TARGET)
    broken = load_conversations(write_jsonl(tmp_path / "rows.jsonl", ["broken"]))
    rows = load_conversations(write_jsonl(tmp_path / "rows.jsonl", [{"text": "import os, sys"}]))
    held_out = [{"prompt": "a"}, {"messages": [{"role": "user", "content": ""}, *MESSAGES[1:]]}, {"prompt": "b"}]
    held_out += [{"prompt": "self " * config.max_position_embeddings}]
    run = SimpleNamespace(
        args=RecipeArguments(target=str(DEMO_TARGET), data="none"), is_main=True, prompt_file=tmp_path / "p.jsonl",
        _split=lambda: (None, held_out), target_config=config, longest_row=64, _write_prompts=lambda: 1,
        training_args=GumihoTrainingArguments(str(tmp_path), use_cpu=True),
    )  # fmt: skip
    assert phases.online_data(run, rows, broken)["eval_dataset"] is None
    assert "held-out rows: No row of the dataset can be used" in capsys.readouterr().out
    Run.measure(run, "tune")
    assert "tune: left out, because it needs --target, --data, and held-out" in capsys.readouterr().out
    assert Run._write_prompts(run) == len(read_prompts(str(run.prompt_file))) == 2  # noqa: SLF001
