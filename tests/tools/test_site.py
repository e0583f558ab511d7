"""What the site generates from code is complete, and references in docstrings lead somewhere."""

import dataclasses
import importlib
import re
from types import ModuleType

import pytest
from scripts import ROOT, load_script

import transformers_gumiho
from transformers_gumiho import DraftingSettings, GumihoConfig


PUBLIC = ("", ".training", ".tools.tuning", ".tools.benchmarking", ".tools.presenting", ".tools.metrics")


@pytest.fixture(scope="module")
def references() -> ModuleType:
    pytest.importorskip("griffe", reason="needs the extra `docs`")
    return load_script("docs/tools/references.py")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load_script("docs/tools/generate.py")


def test_every_public_name_has_its_place(references: ModuleType) -> None:
    import griffe

    package = griffe.load("transformers_gumiho", search_paths=[ROOT / "src"])
    documented = references.find_documented(package)
    for name in PUBLIC:
        module = importlib.import_module(f"{transformers_gumiho.__name__}{name}")
        named = [public for public in module.__all__ if callable(getattr(module, public))]
        assert named
        assert documented.keys() >= set(named)


def test_a_reference_leads_to_its_page_or_is_an_error(references: ModuleType) -> None:
    documented = {"draft": "package.draft"}
    text = "See [`~draft`], [`Hidden`] and [`LlamaConfig`]."
    linked = references.link(text, "package.f", documented, {"Hidden"})
    assert linked == "See [`draft`][package.draft], `Hidden` and `LlamaConfig`."
    with pytest.raises(ValueError, match=r"docstring of `package.f` refers to \[`NoSuchName`\], which does not exist"):
        references.link("See [`NoSuchName`].", "package.f", documented, {"Hidden"})


def test_tables_have_a_row_for_every_setting(generate: ModuleType) -> None:
    def rows(table: str) -> set[str]:
        return set(re.findall(r"^\| `(?:--)?(\w+)` \|.*\w", table, flags=re.M))

    settings = {field.name for field in dataclasses.fields(DraftingSettings)} - {"sampling_temperature"}
    assert rows(generate.decoding_settings()) == settings
    assert rows(generate.config_fields()) == GumihoConfig.__annotations__.keys() - {"model_type", "sub_configs"} - {
        "keys_to_ignore_at_inference"
    }
    assert {"learning_rate", "linear_start", "loss_chunk_size"} <= rows(generate.training_arguments())


def test_every_command_is_on_its_page(generate: ModuleType) -> None:
    page = generate.command_line()
    for command in ("generate", "show", "demo", "benchmark", "tune", "attach", "train", "data"):
        assert f"## gumiho {command}\n" in page
    assert "--transition_rank" in page
    assert "--linear_start" in page
    # Of TrainingArguments, which transformers documents.
    assert "--weight_decay" not in page
