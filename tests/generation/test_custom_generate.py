"""A drafter's repository holds code with which `target.generate(custom_generate=<repository>)` drafts and verifies."""

import gc
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import CommitOperationAdd, HfApi
from streamers import Recorder
from targets import make_drafter, make_prompts, make_target, passes_of
from trained_pair import FOLDER, load_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, dynamic_module_utils

from transformers_gumiho import GumihoModel
from transformers_gumiho.custom_generation import generate


ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of repositories is copied to a folder of the test's own."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")


@pytest.fixture
def target() -> PreTrainedModel:
    return make_target()


@pytest.fixture
def repository(target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `push_to_hub` uploads, in a folder."""
    folder = tmp_path / "gumiho-v1.0"

    def create_commit(self: HfApi, repo_id: str, operations: list[CommitOperationAdd], **kwargs: Any) -> None:
        for operation in operations:
            (folder / operation.path_in_repo).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(operation.path_or_fileobj, folder / operation.path_in_repo)

    pretend_to_push(monkeypatch, create_commit)
    make_drafter(target).push_to_hub("someone/gumiho-v1.0")
    return folder


def pretend_to_push(monkeypatch: pytest.MonkeyPatch, create_commit: Callable[..., None]) -> None:
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: SimpleNamespace(repo_id=repo_id))


def test_pushed_repository_generates_what_plain_decoding_does(target: PreTrainedModel, repository: Path) -> None:
    custom = {"custom_generate": str(repository), "trust_remote_code": True}
    for settings in (
        {"max_new_tokens": 40, "do_sample": False},
        {"max_new_tokens": 40, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
        {"max_new_tokens": 40, "do_sample": True, "return_dict_in_generate": True, "output_scores": True},
    ):
        outputs, streamed = [], []
        for extra in ({}, custom):
            torch.manual_seed(7)
            streamer = Recorder()
            outputs.append(target.generate(**make_prompts([6]), **settings, **extra, streamer=streamer))
            streamed.append(streamer.values)
        assert streamed[0] == streamed[1]
        if "return_dict_in_generate" in settings:
            assert all(torch.allclose(a, b) for a, b in zip(outputs[0].scores, outputs[1].scores, strict=True))
            assert max(outputs[1].accepted_lengths[0]) > 1
            outputs = [output.sequences for output in outputs]
        assert torch.equal(*outputs)
    batch = make_prompts([6, 3])
    plain = target.generate(**batch, max_new_tokens=40, do_sample=False)
    num_passes, drafted = passes_of(
        target, lambda: target.generate(**batch, max_new_tokens=40, do_sample=False, **custom)
    )
    assert torch.equal(drafted, plain)
    assert num_passes < 40


def test_the_drafter_is_loaded_once_for_a_target_and_goes_with_it(
    target: PreTrainedModel, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref] = []
    load = GumihoModel.from_pretrained

    def counting(*args: Any, **kwargs: Any) -> GumihoModel:
        drafter = load(*args, **kwargs)
        loaded.append(weakref.ref(drafter))
        return drafter

    monkeypatch.setattr(GumihoModel, "from_pretrained", counting)
    custom = {"custom_generate": str(repository), "trust_remote_code": True, "max_new_tokens": 8}
    for _ in range(3):
        target.generate(**make_prompts([6]), **custom)
    # The same folder by another name.
    monkeypatch.chdir(repository.parent)
    target.generate(**make_prompts([6]), **custom | {"custom_generate": repository.name})
    assert len(loaded) == 1
    assert loaded[0]().dtype == target.dtype
    # A drafter of the caller's goes first.
    own = make_drafter(target, num_assistant_tokens=1)
    output = target.generate(**make_prompts([6]), **custom, assistant_model=own, return_dict_in_generate=True)
    assert max(output.accepted_lengths[0]) <= 2
    assert len(loaded) == 1
    other = make_target(seed=1)
    other.generate(**make_prompts([6]), **custom)
    assert len(loaded) == 2
    del other
    gc.collect()
    assert loaded[1]() is None
    assert loaded[0]() is not None


@pytest.mark.parametrize("where", [{}, {"revision": "stable"}], ids=str)
def test_a_name_on_the_hub_is_enough(
    target: PreTrainedModel, repository: Path, tmp_path: Path, where: dict[str, str]
) -> None:
    # As it lies in the cache after a download.
    cached = tmp_path / "hub" / "models--someone--gumiho-v1.0"
    shutil.copytree(repository, cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / where.get("revision", "main")).write_text(COMMIT)
    settings = make_prompts([6]) | {"max_new_tokens": 40, "do_sample": False}
    custom = {"custom_generate": "someone/gumiho-v1.0", "trust_remote_code": True, "cache_dir": tmp_path / "hub"}
    num_passes, drafted = passes_of(
        target, lambda: target.generate(**settings, **custom, local_files_only=True, **where)
    )
    assert torch.equal(drafted, target.generate(**settings))
    assert num_passes < 40


def test_it_is_enough_to_import_transformers(target: PreTrainedModel, repository: Path, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "target")
    script = f"""
import sys, torch
from transformers import AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained({str(tmp_path / "target")!r}, dtype=torch.float64)
ids = torch.tensor([[1, 2, 3]])
plain = target.generate(ids, max_new_tokens=30, do_sample=False)
assert "transformers_gumiho" not in sys.modules
output = target.generate(
    ids, max_new_tokens=30, do_sample=False, custom_generate={str(repository)!r}, trust_remote_code=True,
    return_dict_in_generate=True,
)
assert torch.equal(output.sequences, plain)
assert max(output.accepted_lengths[0]) > 1
"""
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    process = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_saving_and_pushing_write_the_same_files(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded: list[set[str]] = []
    pretend_to_push(
        monkeypatch,
        lambda self, repo_id, operations, **_: uploaded.append({operation.path_in_repo for operation in operations}),
    )
    drafter = make_drafter(target)
    drafter.tokenizer = load_tokenizer()
    code = {"custom_generate/generate.py", "custom_generate/requirements.txt"}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    expected = {"config.json", "generation_config.json", "model.safetensors"} | code | tokenizer
    drafter.save_pretrained(tmp_path / "saved")
    assert files_in(tmp_path / "saved") == expected
    # Twice: what is left from the first time is uploaded again, as the weights are.
    for _ in range(2):
        drafter.save_pretrained(tmp_path / "gumiho", push_to_hub=True)
    assert files_in(tmp_path / "gumiho") == expected | {"README.md"}
    drafter.push_to_hub("someone/gumiho")
    assert uploaded == [expected | {"README.md"}] * 3


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_target_may_bring_its_drafter(target: PreTrainedModel, repository: Path, tmp_path: Path) -> None:
    """As docs/guides/serve.md shows for `transformers serve`, which calls the `generate()` of the target it loads."""
    docs = (ROOT / "docs" / "guides" / "serve.md").read_text()
    (code,) = re.findall("<!-- served-target -->\n```python\n(.*?)```", docs, re.DOTALL)
    target.save_pretrained(tmp_path / "served")
    (tmp_path / "served" / "custom_generate").mkdir()
    (tmp_path / "served" / "custom_generate" / "generate.py").write_text(
        code.replace("my/gumiho-llama3-8b", repository.as_posix())
    )
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype=torch.float64, trust_remote_code=True)
    streamer = Recorder()
    settings = GenerationConfig(max_new_tokens=40, do_sample=False, pad_token_id=0)
    num_passes, drafted = passes_of(
        served, lambda: served.generate(**make_prompts([6]), generation_config=settings, streamer=streamer)
    )
    assert torch.equal(drafted, target.generate(**make_prompts([6]), generation_config=settings))
    assert streamer.tokens == drafted[0].tolist()
    assert num_passes < 40


def test_code_asks_for_this_package(repository: Path) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert (repository / "custom_generate" / "requirements.txt").read_text().split() == re.findall(
        '^name = "(.*)"', project, re.MULTILINE
    )


def test_the_demo_pair_is_such_a_repository(repository: Path) -> None:
    for file in (repository / "custom_generate").iterdir():
        assert (FOLDER / "gumiho" / "custom_generate" / file.name).read_text() == file.read_text()


def test_call_without_a_repository(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"not called by `target.generate\(custom_generate=.*pass `assistant_model="):
        generate(target, **make_prompts([4]))


def test_folder_without_a_drafter(target: PreTrainedModel, repository: Path) -> None:
    (repository / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        target.generate(**make_prompts([4]), custom_generate=str(repository), trust_remote_code=True)
