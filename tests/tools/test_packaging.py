"""What is built from the repository, and what an installed package can load."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build(kind: str, source: Path, folder: Path) -> Path:
    folder.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, f"build_{kind}", folder], cwd=source, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a source distribution, built from a copy of the repository's sources."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    for name in ("src", "hub_configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    with tarfile.open(build("sdist", source, folder / "sdist")) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.glob("transformers_gumiho-*")
    return build("wheel", unpacked, folder / "wheel")


def test_wheel_holds_every_module_and_every_config(wheel: Path) -> None:
    package, configs = ROOT / "src" / "transformers_gumiho", ROOT / "hub_configs"
    expected = {f"transformers_gumiho/{path.relative_to(package)}" for path in package.rglob("*.py")}
    expected |= {f"transformers_gumiho/hub_configs/{path.relative_to(configs)}" for path in configs.rglob("*.json")}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected | {"transformers_gumiho/py.typed"}


def test_installed_package_finds_its_configs(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from transformers_gumiho import GumihoConfig; print(GumihoConfig.from_pretrained('amd/Gumiho-llama3-8b'))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True, capture_output=True)
    assert b'"vocab_size": 128256' in done.stdout
