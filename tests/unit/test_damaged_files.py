"""What an interrupted download or copy leaves is refused by the name of the file, with the way out."""

import shutil
from pathlib import Path

import pytest
from chat_target import make_chat_target, make_chat_tokenizer
from checkpoints import small_config
from commands import refuse
from training_data import DEMO_TARGET, write_jsonl

from transformers_gumiho import GumihoModel
from transformers_gumiho.commands import UserError
from transformers_gumiho.model.loading import is_drafter
from transformers_gumiho.tools.pairs import PairArguments, load_target


WAY_OUT = ".*Delete it, and download it again"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    GumihoModel(small_config()).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["[1]", "null", '"text"', "5", '{"num_serial_tokens": 2,', ""])
def test_damaged_json(folder: Path, file: str, text: str) -> None:
    (folder / file).write_text(text)
    with pytest.raises(OSError, match=rf"`{file}` of '{folder}' is damaged: it holds no JSON object{WAY_OUT}"):
        GumihoModel.from_pretrained(folder)


@pytest.mark.parametrize("num_bytes", [0, 100, -100])
def test_damaged_weights(folder: Path, num_bytes: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:num_bytes])
    with pytest.raises(OSError, match=rf"`model\.safetensors` of '{folder}' is damaged: .*header{WAY_OUT}"):
        GumihoModel.from_pretrained(folder)


def test_damaged_files_of_what_commands_name(folder: Path, tmp_path: Path) -> None:
    """Of a target, whose weights transformers reads, and of a drafter that is only looked at."""
    shutil.copytree(DEMO_TARGET, tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"`model\.safetensors` of '.*/target' is damaged: .*header"):
        load_target(PairArguments(target=str(tmp_path / "target")))
    (folder / "config.json").write_text("[1]")
    with pytest.raises(UserError, match=r"No drafter can be read from .* is damaged: it holds no JSON object"):
        is_drafter(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, its drafter and questions."""
    pair, target = tmp_path_factory.mktemp("pair"), make_chat_target()
    target.save_pretrained(pair / "target")
    make_chat_tokenizer().save_pretrained(pair / "target")
    GumihoModel.from_target(target).save_pretrained(pair / "drafter")
    write_jsonl(pair / "questions.jsonl", [{"prompt": f"import os {number}?"} for number in range(8)])
    return pair


COMMANDS: dict[str, list[str]] = {
    "generate": ["--target", "target", "--assistant", "drafter", "--prompt", "import"],
    "attach": ["--target", "target", "--drafter", "drafter", "--output_dir", "attached"],
    "data": ["--target", "target", "--data", "questions.jsonl", "--output_file", "answers.jsonl"],
    "train": ["--target", "target", "--drafter", "drafter", "--data", "questions.jsonl", "--output_dir", "trained",
              "--use_cpu", "--max_steps", "1"],
}  # fmt: skip


@pytest.mark.parametrize("text", ["[1]", "null"])
@pytest.mark.parametrize(
    ("command", "file"),
    [
        *((command, "target/config.json") for command in COMMANDS),
        *((command, "drafter/config.json") for command in ("generate", "attach", "train")),
        *((command, "target/generation_config.json") for command in ("generate", "data", "train")),
        *((command, "target/tokenizer_config.json") for command in ("generate", "data", "train")),
        *((command, "target/tokenizer.json") for command in ("generate", "data", "train")),
        *((command, "target/model.safetensors.index.json") for command in ("generate", "data")),
        ("generate", "drafter/model.safetensors.index.json"),
        ("generate", "target/adapter_config.json"),
    ],
)
def test_commands_name_a_damaged_file(
    pair: Path, command: str, file: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(pair, tmp_path / "pair")
    monkeypatch.chdir(tmp_path / "pair")
    path = Path(file)
    if "index" in file:
        path.with_name("model.safetensors").unlink()
    path.write_text(text)
    refuse(f"`{path.name}` of '{path.parent}' is damaged: it holds no JSON object", command, *COMMANDS[command])


def test_damaged_shard(folder: Path) -> None:
    model = GumihoModel.from_pretrained(folder)
    shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size="20KB")
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(OSError, match=rf"`{second.name}` of '{folder}' is damaged{WAY_OUT}"):
        GumihoModel.from_pretrained(folder)
    assert first.name != second.name


def test_damaged_download(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--someone--gumiho" / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot, ignore=shutil.ignore_patterns("hub"))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    (snapshot / "model.safetensors").write_bytes(b"<html>")
    with pytest.raises(OSError, match=rf"`model\.safetensors` of 'someone/gumiho' is damaged{WAY_OUT}"):
        GumihoModel.from_pretrained("someone/gumiho", cache_dir=tmp_path / "hub")
