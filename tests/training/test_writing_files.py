"""The files of answers and questions, which a stopped run continues, in one or several processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_target import make_chat_target, make_chat_tokenizer
from commands import gumiho, interrupt
from datasets import Dataset
from full_disk import disk_of, no_room
from training_data import write_jsonl

from transformers_gumiho.training import (
    LocalEngine,
    Sampling,
    WritingSettings,
    feature_cache,
    regenerate_dataset,
    synthesize_dataset,
    write_feature_cache,
)
from transformers_gumiho.training.data.manifest import begin
from transformers_gumiho.training.writing import row_file


TARGET, TOKENIZER = make_chat_target(), make_chat_tokenizer()
ROWS = [{"prompt": f"def f{index}(self):"} for index in range(11)] + [{"prompt": None}]


def write_answers(path: Path, seed: int = 0) -> None:
    settings = WritingSettings(64, 20, Sampling(share=1.0), seed)
    regenerate_dataset(Dataset.from_list(ROWS), LocalEngine(TARGET, 2), TOKENIZER, path, settings)


def write_questions(path: Path, seed: int = 0, num_prompts: int = 7) -> list[str]:
    settings: dict[str, Any] = {"max_prompt_tokens": 40, "seed": seed}
    dataset = synthesize_dataset(num_prompts, LocalEngine(TARGET, 4), TOKENIZER, path, **settings)
    return [row["messages"][0]["content"] for row in dataset]


def write_features(path: Path) -> None:
    rows = [{"input_ids": [*range(index, 20)]} for index in range(9)]
    write_feature_cache(Dataset.from_list(rows), TARGET, TOKENIZER, path, shard_bytes=2 * 20 * (32 * 2 + 12))


WRITERS = [write_answers, write_questions]
Whole = dict[Callable[..., Any], list[bytes]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The lines of each file, written without a stop."""
    paths = {write: tmp_path_factory.mktemp("whole") / "a.jsonl" for write in WRITERS}
    for write, path in paths.items():
        write(path)
    return {write: path.read_bytes().splitlines(keepends=True) for write, path in paths.items()}


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("num_bytes", [0, 10, 900, 10**6])
def test_a_killed_run_goes_on_to_the_same_file(write: Any, num_bytes: int, whole: Whole, tmp_path: Path) -> None:
    """Also where lines that another process wrote are beside it. Other settings are refused."""
    path, lines = tmp_path / "a [1].jsonl", whole[write]
    path.write_bytes(b"".join(lines)[:num_bytes])
    (tmp_path / "a [1].jsonl.part3").write_bytes(b"".join(lines[4:6]) + b'{"row": 7, "te')
    write(path)
    assert path.read_bytes() == b"".join(lines)
    assert [json.loads(line)["row"] for line in lines] == [*range(len(lines))]
    assert not list(tmp_path.glob("*.part*"))
    with pytest.raises(ValueError, match=r"was created with different settings: seed \(0, now 1\)\. Write into"):
        write(path, seed=1)


def test_more_questions_begin_with_those_that_are_there(whole: Whole, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"".join(whole[write_questions]))
    found = write_questions(tmp_path / "a.jsonl")
    rows = list(map(json.loads, whole[write_questions]))
    assert found == [row["prompt"] for row in rows if "dropped" not in row][:7]
    assert write_questions(tmp_path / "a.jsonl", num_prompts=9)[:7] == found


@pytest.mark.parametrize(
    ("write", "owner", "name"),
    [
        (write_answers, row_file, "append_rows"), (write_questions, row_file, "append_rows"),
        (write_features, feature_cache, "save_file"),
    ],
    ids=["answers", "questions", "features"],
)  # fmt: skip
def test_a_second_run_is_refused(
    write: Any, owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the first one ends as if it had been alone."""
    real, refused = getattr(owner, name), []

    def write_and_start_again(*arguments: Any) -> None:
        real(*arguments)
        with pytest.raises(OSError, match=r"Another run is writing there\. Wait for it to end") as error:
            write(tmp_path / "a")
        refused.append(error)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, write_and_start_again)
        write(tmp_path / "a")
    assert len(refused) > 2
    write(tmp_path / "b")
    first, alone = (
        {file.relative_to(path).as_posix(): file.read_bytes() for file in (path, *path.rglob("*")) if file.is_file()}
        for path in (tmp_path / "a", tmp_path / "b")
    )
    assert first == alone


@pytest.mark.parametrize("write", WRITERS)
def test_a_full_disk_keeps_what_was_written(
    write: Any, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num_bytes = tmp_path / "a.jsonl", sum(map(len, whole[write][:3])) + 10
    monkeypatch.setattr(Path, "open", disk_of(num_bytes, Path.open, "a.jsonl"))
    with pytest.raises(OSError, match=r"a.jsonl': No space left on device. What was written before stays. Make room"):
        write(path)
    assert path.stat().st_size == num_bytes
    monkeypatch.undo()
    write(path)
    assert path.read_bytes() == b"".join(whole[write])


@pytest.mark.parametrize("lines", ['{"prompt": "x"}\n{"prompt"', "[1]\n", "\x00\x00\n", '{"row": 0}\n{"ro\n'])
@pytest.mark.parametrize("write", WRITERS)
def test_a_file_of_something_else_is_left_as_it_is(write: Any, lines: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=r"a.jsonl' holds a line that is damaged, or that this command did not write"):
        write(tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_text() == lines
    assert [*tmp_path.iterdir()] == [tmp_path / "a.jsonl"]
    with pytest.raises(ValueError, match=r"' is a folder\. Name a file in it"):
        write(tmp_path)


def test_trouble_with_the_settings_beside_a_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, beside = tmp_path / "a.jsonl", tmp_path / "a.jsonl.made_from.json"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", no_room)
        with pytest.raises(OSError, match=r"Could not write '.*a.jsonl.made_from.json': No space left on device"):
            begin(path, {"seed": 0})
    begin(path, {"seed": 1})
    path.write_text("{}\n")
    with pytest.raises(ValueError, match=r"different settings: seed \(1, now 2\)"):
        begin(path, {"seed": 2})
    beside.write_text("")
    with pytest.raises(ValueError, match=r"a.jsonl.made_from.json' is damaged. .* Delete it to continue"):
        begin(path, {"seed": 0})


# Runs `gumiho` with each list of words in a file. In the last run, the second process is killed after three writes.
RUN = """
import json, os, sys
from accelerate import PartialState
from transformers_gumiho.training.writing import row_file
from transformers_gumiho.cli import main
rows_left, append_rows = 99, row_file.append_rows
def append(*arguments):
    global rows_left
    rows_left -= PartialState().process_index
    if rows_left < 0:
        os._exit(9)
    append_rows(*arguments)
row_file.append_rows = append
runs = json.load(open("runs.json"))
for words in runs:
    rows_left = 3 if words is runs[-1] else 99
    sys.argv = ["gumiho", *words]
    main()
"""
LAUNCH = [
    "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--main_process_port", "0", "run.py",
]  # fmt: skip
WORDS = [
    "--max_new_tokens", 6, "--seed", 0, "--writing_batch_size", 2, "--target_dtype", "float32", "--sampled_share",
    0.5,
]  # fmt: skip


def test_several_processes_write_what_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command. Where one of two processes is killed, a single one goes on, and the other way round."""
    write_jsonl(tmp_path / "questions.jsonl", [{"prompt": f"def f{index}(self, x):\n    "} for index in range(17)])
    TARGET.save_pretrained(tmp_path / "target")
    TOKENIZER.save_pretrained(tmp_path / "target")
    monkeypatch.chdir(tmp_path)

    def words(data: str, file: str) -> list[str]:
        own = ["--num_prompts", 9, "--max_prompt_tokens", 40] if data == "none" else []
        return list(map(str, ["data", "--target", "target", "--data", data, "--output_file", file, *WORDS, *own]))

    def check(data: str, num_rows: int) -> None:
        one, several = (Path(f"{file}_{data}").read_bytes() for file in ("one", "several"))
        assert len(one.splitlines()) == num_rows
        assert several == one
        for row in map(json.loads, one.splitlines()):
            assert [turn["role"] for turn in row["messages"]] == ["user", "assistant"]

    for data in ("none", "questions.jsonl"):
        gumiho(*words(data, f"one_{data}"))
    # One process begins, and two go on. Then two begin, and one goes on.
    interrupt(row_file, "append_rows", 3, *words("none", "several_none"))
    runs = [words(data, f"several_{data}") for data in ("none", "questions.jsonl")]
    Path("runs.json").write_text(json.dumps(runs))
    Path("run.py").write_text(RUN)
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run([sys.executable, *LAUNCH], env=environment, capture_output=True, timeout=500)
    assert Path("several_questions.jsonl.part1").exists(), process.stderr.decode()[-3000:]
    check("none", 9)
    gumiho(*runs[-1])
    check("questions.jsonl", 17)
