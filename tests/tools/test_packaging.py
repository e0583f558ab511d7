"""What is built from the repository, and what an installed package can load."""

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


ROOT = Path(__file__).parents[2]
DOCUMENTS = {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md"}
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build(kind: str, source: Path, folder: Path) -> Path:
    folder.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, f"build_{kind}", folder], cwd=source, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def unpacked_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, built from a copy of the repository's sources."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    for name in ("src", "hub_configs", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "MANIFEST.in", *DOCUMENTS):
        shutil.copy(ROOT / name, source)
    with tarfile.open(build("sdist", source, folder / "sdist")) as archive:
        # Asked for from Python 3.12 on, and unknown to the first releases of 3.10 and 3.11.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = folder.glob("transformers_gumiho-*")
    return unpacked


@pytest.fixture(scope="module")
def wheel(unpacked_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from the source distribution."""
    return build("wheel", unpacked_sdist, tmp_path_factory.mktemp("build") / "wheel")


def test_source_distribution_holds_the_documents_and_no_tests(unpacked_sdist: Path) -> None:
    held = {path.name for path in unpacked_sdist.iterdir()}
    assert held >= DOCUMENTS
    # Without the demo pair, which is left out for its size, they could not run.
    assert "tests" not in held


def test_wheel_holds_every_module_and_every_config(wheel: Path) -> None:
    package, configs = ROOT / "src" / "transformers_gumiho", ROOT / "hub_configs"
    expected = {f"transformers_gumiho/{path.relative_to(package)}" for path in package.rglob("*.py")}
    expected |= {f"transformers_gumiho/hub_configs/{path.relative_to(configs)}" for path in configs.rglob("*.json")}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    entry_points = {"transformers_gumiho_cli.py", "transformers_gumiho_vllm.py"}
    data = {"py.typed", "training/recipe/defaults.yaml", "training/model_card.md"}
    assert held == expected | entry_points | {f"transformers_gumiho/{name}" for name in data}


def test_installed_package_finds_its_configs(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from transformers_gumiho import GumihoConfig; print(GumihoConfig.from_pretrained('amd/Gumiho-llama3-8b'))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True, capture_output=True)
    assert b'"vocab_size": 128256' in done.stdout


def imported_by(*folders: Path) -> set[str]:
    """Returns the distributions that the modules of folders import, by the names that the package index has."""
    modules: set[str] = set()
    for path in [path for folder in folders for path in folder.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(node.module.split(".")[0])
    own = {path.stem for folder in folders for path in folder.rglob("*")} | {
        "transformers_gumiho",
        "transformers_gumiho_cli",
        "transformers_gumiho_vllm",
    }
    # Only who builds the site has installed griffelib, whose name differs from its module's.
    distributions = {"griffe": ["griffelib"], **packages_distributions()}
    return {
        canonicalize_name(distributions.get(module, [module])[0])
        for module in modules - own - set(sys.stdlib_module_names)
    }


def declared(*extras: str) -> set[str]:
    """Returns the distributions that pyproject declares in the core and in extras, with those that these include."""
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names: set[str] = set()
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    for requirement in map(Requirement, lines):
        if requirement.name == project["name"]:
            names |= declared(*requirement.extras)
        else:
            assert any(specifier.operator == ">=" for specifier in requirement.specifier), (
                f"{requirement} has no bound"
            )
            names.add(canonicalize_name(requirement.name))
    return names


def test_every_import_is_a_declared_dependency() -> None:
    package = ROOT / "src" / "transformers_gumiho"
    folders = [path for path in package.glob("*/") if path.name != "tools"] + [*package.glob("tools/*/")]
    rooms = {path.name: path for path in folders if path.name != "__pycache__"}
    extras = {"train": {"training", "metrics"}, "vllm": {"vllm"}}
    core = [
        path for name, path in rooms.items() if not any(name in names for names in [*extras.values(), {"presenting"}])
    ]
    # A prompts file may be a dataset; who has no `datasets` is told to install it.
    assert imported_by(*core) - {"datasets"} <= declared()
    for extra, names in extras.items():
        assert imported_by(*(rooms[name] for name in names)) <= declared(extra)
    # The page needs Gradio.
    assert imported_by(rooms["presenting"]) <= declared("demo")
    assert imported_by(package) <= declared("train", "demo")
    # These are in environments of their own, for the tests in `tests/serving` and in `tests/clients`.
    elsewhere = {"triton", "vllm", "langchain-core", "langchain-huggingface", "lm-eval", "outlines", "smolagents"}
    elsewhere |= {"trl", "xgrammar"}
    others = imported_by(ROOT / "tests", ROOT / "docs", ROOT / "examples", ROOT / "benchmarks")
    assert others - elsewhere <= declared("dev")
