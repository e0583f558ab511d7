"""The API reference can be built, and its references lead somewhere."""

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest


pytest.importorskip("pdoc", reason="needs the extra `docs`")

SCRIPT = Path(__file__).parents[2] / "docs" / "build_api_reference.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    script.build(folder)
    return folder


def test_every_public_name_has_its_place(script: ModuleType, folder: Path) -> None:
    for page in script.PAGES:
        html = (folder / f"{page.replace('.', '/')}.html").read_text(encoding="utf-8")
        names = [name for name, value in script.members_of(page) if callable(value)]
        assert names
        for name in names:
            assert f'id="{name}"' in html, f"{page}.{name}"


def test_options_have_their_help(folder: Path) -> None:
    html = (folder / "transformers_gumiho" / "presenting.html").read_text(encoding="utf-8")
    assert "Verification cycle to show, counted from 1." in html


def test_no_link_is_broken(folder: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}
    num_links = 0
    for path, html in pages.items():
        for link in re.findall(r'<code><a href="([^"]*)">', html):
            target, _, anchor = link.partition("#")
            found = pages[(path.parent / target).resolve()] if target else html
            assert f'id="{anchor}"' in found, (path, link)
            num_links += 1
        assert not re.search(r"\[<code>", html)
    assert num_links > 50


def test_a_reference_to_nothing_is_an_error(script: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"refers to \[`NoSuchName`\], which does not exist"):
        script.link_references("See [<code>NoSuchName</code>].", "transformers_gumiho", {})
