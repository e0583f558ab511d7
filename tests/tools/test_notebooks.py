"""The notebooks of the site run, and show what they say."""

import json
import re
from types import ModuleType

import pytest
from scripts import ROOT, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("docs/tools/notebooks.py")


def test_pages_of_notebooks_hold_code_text_and_pictures(script: ModuleType) -> None:
    assert [path.stem for path in script.NOTEBOOKS] == ["quickstart", "train_a_drafter", "tune_and_benchmark"]
    pages = {path.stem: script.to_markdown(json.loads(path.read_text(encoding="utf-8"))) for path in script.NOTEBOOKS}
    assert all(path.stat().st_size < 60_000 for path in script.NOTEBOOKS)
    assert all(page.startswith("# ") and "```python\n" in page and ".ipynb)" not in page for page in pages.values())
    assert "<svg" in pages["quickstart"]
    assert "same tokens: True" in pages["quickstart"]
    assert "tokens/s\n```" not in pages["quickstart"]
    assert 'src="data:image/png;base64,' in pages["tune_and_benchmark"]


def printed(script: ModuleType, name: str) -> str:
    """Executes a notebook and returns what its cells print."""
    pytest.importorskip("nbclient", reason="needs the extra `docs`")
    notebook = script.execute(ROOT / "docs" / "notebooks" / f"{name}.ipynb")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


@pytest.mark.slow
def test_quickstart(script: ModuleType) -> None:
    text = printed(script, "quickstart")
    assert "same tokens: True" in text
    assert float(re.search(r"passes: tau ([\d.]+)", text)[1]) > 2
    assert "speed-up " in text


@pytest.mark.slow
def test_train_a_drafter(script: ModuleType) -> None:
    tau = dict(
        re.findall(r"^(untrained|trained here|shipped) +tau ([\d.]+)$", printed(script, "train_a_drafter"), re.M)
    )
    assert 1 <= float(tau["untrained"]) < 1.5 < float(tau["trained here"]) < float(tau["shipped"])


@pytest.mark.slow
def test_tune_and_benchmark(script: ModuleType) -> None:
    rows = re.findall(r"^tree of (\d+) +3 of 3 texts .* tau ([\d.]+)$", printed(script, "tune_and_benchmark"), re.M)
    assert [int(size) for size, _ in rows] == [2, 4, 8, 16, 32]
    assert float(rows[0][1]) < float(rows[-1][1])
