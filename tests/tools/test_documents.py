"""What the documents name exists, and the imports that they show work."""

import ast
import importlib
import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from scripts import ROOT, load_script
from training_data import DEMO_TARGET, make_tokenizer
from transformers import AutoModelForCausalLM

import transformers_gumiho
from transformers_gumiho import GumihoConfig, GumihoModel
from transformers_gumiho.tools.presenting import Cycle
from transformers_gumiho.tools.presenting.cycles import CycleLabels


REPOSITORY = "https://github.com/transformers-gumiho/transformers-gumiho/"
RAW = "https://raw.githubusercontent.com/transformers-gumiho/transformers-gumiho/main/"
FOLDERS = (ROOT / "docs", ROOT / "examples", ROOT / "benchmarks" / "reports")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in folder.rglob("*.md"))])
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
    # What the guides' commands write is ignored by git.
    written = re.findall(r"^/([\w-]+)/$", (ROOT / ".gitignore").read_text(encoding="utf-8"), flags=re.M)
    folders = "|".join(
        sorted(
            path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name not in written
        )
    )
    named = re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./{{}},-]*[\w/}}])", text)
    for name in named:
        before, _, choices = name.partition("{")
        choices, _, after = choices.partition("}")
        for choice in choices.split(","):
            # What a command writes is not there yet; ignored folders are such.
            if before.split("/")[0] not in ("build", "benchmark", "dist"):
                path = f"{before}{choice}{after}"
                assert (ROOT / path).exists() or (document.parent / path).exists(), name


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


def test_every_page_is_in_the_navigation_and_short() -> None:
    # MkDocs needs tags that are not plain YAML for the rest of the file.
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {path.relative_to(ROOT / "docs").as_posix(): path for path in (ROOT / "docs").rglob("*.md")}
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    assert set(re.findall(r"- ([\w/-]+\.md)$", navigation, flags=re.M)) == pages.keys() | notebooks
    for name, path in pages.items():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 200, name


# Words that readers of other packages do not know.
OWN_WORDS = (
    "tau", "paus", "break.even", "draft vocabulary", "draft temperature", "transitions", "feature cache",
    "linear start", "own features", "chain",
)  # fmt: skip


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "guides").glob("*.md")), ids=lambda page: page.stem)
def test_a_guide_begins_with_its_command_and_links_its_own_words(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.splitlines()[2].startswith("```")
    prose = re.sub(r"^ *```.*?```$|^#[^\n]*", "", text, flags=re.M | re.S)
    prose = re.sub(r"(\[`[^`]*`\]\()|`[^`]*`", r"\1", prose)  # code, except in links
    links = [link.span() for link in re.finditer(r"\[[^\]]*\]\([^)]*\)", prose)]
    for word in OWN_WORDS:
        first = re.search(rf"\b{word}", prose, flags=re.IGNORECASE)
        assert first is None or any(start <= first.start() < end for start, end in links), word


def test_the_figures_of_the_authors_are_the_same_in_both_places() -> None:
    def rows(path: Path) -> dict[str, tuple[str, ...]]:
        row = r"^\| `([\w./-]+)` \|(?: `amd/.*?` \|)? ([\d.]+x) \| ([\d.]+) \|"
        found = re.findall(row, path.read_text(encoding="utf-8"), flags=re.M)
        return {name: figures for name, *figures in found if not name.startswith("HuggingFaceTB")}

    shown = rows(ROOT / "docs" / "benchmarks" / "index.md")
    assert len(shown) == 7
    assert shown == rows(ROOT / "README.md")


def test_readme_shows_code_early_and_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert next(number for number, line in enumerate(lines, start=1) if line.startswith("```")) <= 45


def test_code_of_the_readme_writes_the_text_of_plain_generate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(DEMO_TARGET / name)
    (code,) = code_of(ROOT / "README.md")
    for shown, run in (
        ("meta-llama/Meta-Llama-3-8B-Instruct", str(tmp_path)),
        ("amd/Gumiho-llama3-8b", str(DEMO_TARGET.with_name("gumiho"))),
        ("bfloat16", "float32"),
        ("cuda", "cpu"),
        ("max_new_tokens=256", "max_new_tokens=48"),
    ):
        assert shown in code
        code = code.replace(shown, run)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert isinstance(names["gumiho"], GumihoModel)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    chat = [{"role": "user", "content": "Why is the sky blue?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    plain = target.generate(**inputs, max_new_tokens=48)[0, inputs.input_ids.shape[1] :]
    assert capsys.readouterr().out == tokenizer.decode(plain, skip_special_tokens=True) + "\n"


def test_memory_of_the_released_drafters_is_that_of_their_configs() -> None:
    """In gigabytes of 16-bit numbers, without the token embedding and with it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\|.*\| `amd/(.*?)` \|.*\| ([\d.]+ \([\d.]+\)) \|", text, flags=re.M))
    expected = {}
    for folder in (ROOT / "hub_configs").glob("Gumiho-*"):
        with torch.device("meta"):
            drafter = GumihoModel(GumihoConfig.from_pretrained(folder))
        own = sum(parameter.numel() for parameter in drafter.parameters())
        shared = own - drafter.embed_tokens.weight.numel()
        expected[folder.name] = f"{2 * shared / 1e9:.2f} ({2 * own / 1e9:.2f})"
    assert shown == expected


def test_readme_counts_the_model_types_of_the_table() -> None:
    table = (ROOT / "benchmarks" / "reports" / "2026-11-model-types.md").read_text(encoding="utf-8")
    kinds = [len(re.findall(rf"^\| `.*?` \| {kind} \|", table, flags=re.M)) for kind in ("tree", "chain", "refused")]
    tree, chain, refused = kinds
    total = int(re.search(r"(\d+) model types: ", table)[1])
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"[{tree + chain} of {total} model types]" in text
    assert f"{tree} verify trees; {chain}, such as" in text
    assert f"{refused} are refused with the reason, and {total - sum(kinds)} were not tested" in text


def test_pictures_of_speed_are_those_of_the_reports() -> None:
    script = load_script("docs/pictures/draw_speed.py")
    for name, drawn in script.pictures().items():
        assert (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") == drawn
    assert script.speedups_by_task()["all"] == {
        "prompt lookup": 1.45, "drafter": 1.56, "drafter and prompt lookup": 2.04,
    }  # fmt: skip
    assert [points for _, points, _, _ in script.speedups_by_requests()][2] == [
        (1, 1.49), (4, 1.08), (8, 1.12), (16, 0.98),
    ]  # fmt: skip


def test_pictures_of_the_method_show_a_cycle() -> None:
    script = load_script("docs/pictures/draw_method.py")
    cycle = Cycle((5, 6, 7, 8), (0, 0, 1, 1), (0.0, -0.1, -0.2, -2.0), accepted=(1, 2), bonus_token=9)
    labels = CycleLabels("", ("'root'", "'a'", "'b'", "'<c'", "'bonus'"))
    drawn = ElementTree.fromstring(script.draw_cycle(cycle, labels))
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text.startswith("'")][-4:] == ["'root'", "'a'", "'b'", "'bonus'"]
    mask = ElementTree.fromstring(script.draw_mask(cycle, labels))
    cells = [cell.get("fill") for cell in mask.iter("{http://www.w3.org/2000/svg}rect")][1:]
    seen = [[fill != "#f1f5f9" for fill in cells[row * 5 + 1 : row * 5 + 5]] for row in range(4)]
    assert seen == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, False, True],
    ]
    assert ElementTree.fromstring(script.draw_drafter()) is not None


def test_the_picture_of_an_answer_has_the_numbers_of_its_captions() -> None:
    """It is drawn by the command that the quickstart shows."""
    drawn = (ROOT / "docs" / "images" / "answer.svg").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    tokens, drafts, passes = re.search(r"(\d+) tokens, (\d+) accepted drafts \| (\d+) passes<", drawn).groups()
    for document in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        text = " ".join(document.read_text(encoding="utf-8").split())
        assert f"{drafts} of its {tokens} tokens are accepted drafts" in text
        assert re.search(rf"{passes} passes after the prompt's, .* {int(tokens) - 1}\b", text)


def test_every_room_is_described() -> None:
    described = set(
        re.findall(r"^\| `([\w/.]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.M)
    )
    package = ROOT / "src" / "transformers_gumiho"
    rooms = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert described == rooms | {path.name for path in package.glob("*.py")} - {"__init__.py"}


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
