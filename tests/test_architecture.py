"""The rooms of the package, and the only directions in which imports go between them."""

import ast
from pathlib import Path

import pytest

import transformers_gumiho


ROOT = Path(transformers_gumiho.__file__).parent

# What each module may import from the package. A module of a room sees the rooms before it, never those after.
ALLOWED = {
    "configuration_gumiho": set(),
    "parallel_heads": {"configuration_gumiho"},
    "unrolling": set(),
    "modeling_gumiho": {"configuration_gumiho", "parallel_heads", "unrolling"},
    "output_head": set(),
    "tree": set(),
    "verification": {"tree"},
    "cache": set(),
    "losses": {"configuration_gumiho", "modeling_gumiho"},
    "drafting": {"configuration_gumiho", "modeling_gumiho", "parallel_heads", "tree"},
    "candidate_generator": {"modeling_gumiho", "drafting", "tree"},
    # The generation loop is one room of several files.
    "compatibility": {"modeling_gumiho", "cache"},
    "target": {"tree", "cache", "compatibility"},
    "sequences": set(),
    "choosing": {"sequences", "tree", "verification"},
    "generation": {
        "modeling_gumiho", "drafting", "candidate_generator", "tree", "cache", "compatibility", "target", "sequences",
        "choosing", "output_head",
    },
    "__init__": {
        "configuration_gumiho", "modeling_gumiho", "drafting", "candidate_generator", "generation",
    },
}  # fmt: skip
TORCH_ONLY = ("tree", "verification")


def imports_of(path: Path) -> tuple[set[str], set[str]]:
    """Returns the modules of the package and the packages outside it that a file imports."""
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            (inside if node.level else outside).add(node.module.split(".")[0])
    return inside, outside


def test_every_module_has_its_room() -> None:
    assert {path.stem for path in ROOT.rglob("*.py")} == set(ALLOWED)


@pytest.mark.parametrize("module", list(ALLOWED))
def test_imports_go_the_way_of_the_picture(module: str) -> None:
    inside, outside = imports_of(ROOT / f"{module}.py")
    assert inside <= ALLOWED[module]
    if module in TORCH_ONLY:
        assert "transformers" not in outside
