"""What the documents name exists, and the imports that they show work."""

import ast
import dataclasses
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import yaml
from transformers import GenerationConfig

import transformers_gumiho
from transformers_gumiho import DraftingSettings, GumihoConfig


ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
REPOSITORY = "https://github.com/transformers-gumiho/transformers-gumiho/"
RAW = "https://raw.githubusercontent.com/transformers-gumiho/transformers-gumiho/main/"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])
IDS = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)


def anchors_of(document: Path) -> set[str]:
    """Returns the anchors that GitHub gives a document's headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links_of(document: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))


def local_target(document: Path, link: str) -> tuple[Path, str] | None:
    """Returns the file of this repository that a link leads to, and the anchor in it; None for any other page."""
    path, _, anchor = link.partition("#")
    for prefix in (f"{REPOSITORY}blob/main/", f"{REPOSITORY}tree/main/", RAW):
        if path.startswith(prefix):
            return ROOT / path.removeprefix(prefix), anchor
    if re.match(r"\w+:", path):
        return None
    return document.parent / path if path else document, anchor


def code_of(document: Path) -> list[str]:
    """Returns the Python of a document's code blocks, without a doctest's prompts and outputs."""
    blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [
        "\n".join(line[4:] for line in block.splitlines() if line.startswith((">>>", "...")))
        if block.startswith(">>>")
        else block
        for block in blocks
    ]


@every_document
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for link in links_of(document):
        if (target := local_target(document, link)) is not None:
            path, anchor = target
            assert path.exists(), link
            assert not anchor or anchor in anchors_of(path), link


@every_document
def test_named_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    folders = "|".join(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."))
    named = re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./{{}},-]*[\w/}}])", text)
    for name in named:
        before, _, choices = name.partition("{")
        choices, _, after = choices.partition("}")
        for choice in choices.split(","):
            # What a command writes is not there yet; ignored folders are such.
            if before.split("/")[0] not in ("build", "benchmark", "dist"):
                assert (ROOT / f"{before}{choice}{after}").exists(), name


@every_document
def test_named_modules_exist(document: Path) -> None:
    folders = ("src", "tests", "docs", "examples", "benchmarks")
    names = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    # The code in a drafter's or a target's own repository, and a reader's own script.
    names |= {"generate.py", "script.py"}
    for name in re.findall(r"`(\w+\.py)`", document.read_text(encoding="utf-8")):
        assert name in names


@every_document
def test_shown_imports_work(document: Path) -> None:
    for code in code_of(document):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)
            elif isinstance(node, ast.ImportFrom):
                if node.module == "vllm" and importlib.util.find_spec("vllm") is None:  # in an environment of its own
                    continue
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


def test_links_of_the_long_description_are_absolute() -> None:
    # The package index shows the README without the repository around it.
    for link in links_of(ROOT / "README.md"):
        assert link.startswith("https://"), link


def test_documents_are_all_reached_from_the_readme() -> None:
    reached = {
        local_target(ROOT / "README.md", link)[0] for link in links_of(ROOT / "README.md") if REPOSITORY in link
    }
    assert reached >= set((ROOT / "docs").glob("*.md"))


def test_every_room_is_described() -> None:
    described = set(
        re.findall(r"^\| `([\w/.]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.M)
    )
    package = ROOT / "src" / "transformers_gumiho"
    rooms = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert described == rooms | {path.name for path in package.glob("*.py")} - {"__init__.py"}


def test_settings_have_the_defaults_that_are_shown() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| ([^|]*) \|", (ROOT / "docs" / "settings.md").read_text(encoding="utf-8"), flags=re.M
    )
    shown = {name: ast.literal_eval(default.strip("`")) for name, default in rows}
    settings = DraftingSettings.from_generation_config(GenerationConfig(), GumihoConfig(), None)
    assert shown.keys() == {field.name for field in dataclasses.fields(settings)} - {"sampling_temperature"}
    # What is not set by default is described in words.
    set_by_default = {name: default for name, default in shown.items() if default is not None}
    assert set_by_default == {name: getattr(settings, name) for name in set_by_default}


def test_version_is_one() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == transformers_gumiho.__version__
    assert f"## {transformers_gumiho.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_quickstart_is_short_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    script = ROOT / "examples" / "quickstart.py"
    code = script.read_text(encoding="utf-8")
    assert len(code.splitlines()) < 40
    exec(compile(code, str(script), "exec"), {"__file__": str(script), "__name__": "__main__"})
    printed = capsys.readouterr().out
    assert re.search(r"the same tokens as plain generate\(\) +True", printed)
    # A drafter that is never right commits one token per cycle.
    assert float(re.search(r"\(tau\) +([\d.]+)", printed)[1]) > 2
