"""What is saved and pushed with a drafter, and what `target.generate(custom_generate=<its repository>)` answers."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from targets import make_drafter, make_prompts, make_target
from trained_pair import FOLDER, load_tokenizer
from transformers import PreTrainedModel, dynamic_module_utils


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


def test_a_drafter_is_an_assistant_and_no_custom_generate(target: PreTrainedModel, repository: Path) -> None:
    """Whichever code its repository holds: that of drafters that were saved before imports the same function."""
    custom = {"custom_generate": str(repository), "trust_remote_code": True}
    for assistant in ({}, {"assistant_model": make_drafter(target)}):
        with pytest.raises(
            ValueError, match=r"`assistant_model`: `target\.generate\(\.\.\., assistant_model='owner/drafter'\)`"
        ):
            target.generate(**make_prompts([4]), **custom, **assistant)


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
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    expected = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "custom_generate/generate.py",
    } | tokenizer
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


def test_the_demo_pair_is_such_a_repository(repository: Path) -> None:
    for file in (repository / "custom_generate").iterdir():
        assert (FOLDER / "gumiho" / "custom_generate" / file.name).read_text() == file.read_text()
