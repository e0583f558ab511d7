"""The rooms of the package, and the only directions in which imports go between them."""

import ast
from pathlib import Path

import pytest

import transformers_gumiho


ROOT = Path(transformers_gumiho.__file__).parent

# For each room the others that it may import; all may import `commands`. The folders of three rooms have an order,
# too. Within a folder imports are free, as long as they make no circle.
MAY_IMPORT = {
    "commands": "",
    "files": "",
    "internals": "",
    "model": "files internals",
    "generation.tree": "",
    "generation.verification": "internals model generation.tree",
    "generation.drafting": "internals model generation.tree generation.verification",
    "generation": "files internals model generation.tree generation.verification generation.drafting",
    "training.data": "files model",
    "training.losses": "model",
    # With `generation`, training measures tau and records what is generated.
    "training": ("internals model generation.verification generation training.data training.losses training.writing"),
    "training.writing": "internals model generation.verification training.data",
    "training.recipe": "files internals model generation.verification training.data training training.writing",
    "tools.metrics": "",
    "tools.pairs": "files model generation.verification training.data",
    "tools.measuring": "files model generation.verification generation.drafting generation training.data",
    "tools.benchmarking": (
        "files internals model generation.verification training.data tools.metrics tools.pairs tools.measuring"
    ),
    "tools.tuning": "files model generation.verification training.data tools.pairs tools.measuring",
    "tools.presenting": (
        "model generation.tree generation.verification generation.drafting generation training.data tools.pairs "
        "tools.measuring"
    ),
    "tools": (
        "files model generation training training.data training.recipe tools.pairs tools.benchmarking tools.tuning"
    ),
    "vllm": "files model",
    "custom_generation": "internals model generation training",
    "__init__": "internals model generation.verification generation.drafting generation training",
    "cli": "training.recipe tools.benchmarking tools.tuning tools.presenting tools",
}
ROOMS = {room: set(others.split()) for room, others in MAY_IMPORT.items()}
MODULES = sorted(ROOT.rglob("*.py"))


def room_of(module: str) -> str:
    parts = module.split(".")
    folder = ".".join(parts[:2])
    return folder if len(parts) > 1 and ROOT.joinpath(*parts[:2]).is_dir() and folder in ROOMS else parts[0]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports_of(path: Path) -> tuple[set[str], set[str]]:
    """Returns the modules of the package and the packages outside it that a file imports, wherever it does so."""
    inside, outside = set(), set()
    folder = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) + 1 - node.level]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            inside |= {".".join([*base, name]) for name in names}
        elif isinstance(node, ast.ImportFrom):
            outside.add(node.module.split(".")[0])
    return inside, outside


def test_every_module_has_its_room() -> None:
    assert {room_of(name_of(path)) for path in MODULES} == set(ROOMS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_keep_the_order_of_rooms(path: Path) -> None:
    inside, outside = imports_of(path)
    room = room_of(name_of(path))
    assert {room_of(module) for module in inside} - {room} <= ROOMS[room] | {"commands"}
    # evaluate copies its metric elsewhere, where a relative import would lead nowhere.
    assert ("transformers_gumiho" in outside) == (name_of(path) == "tools.metrics.acceptance_length")
    if room == "generation.tree":
        assert "transformers" not in outside


def test_rooms_have_an_order() -> None:
    """No room sees another that sees it, directly or through others."""
    left = {room: set(others) for room, others in ROOMS.items()}
    while left:
        free = {room for room, others in left.items() if not others & set(left)}
        assert free, f"circle among {sorted(left)}"
        left = {room: others for room, others in left.items() if room not in free}


def test_modules_of_a_room_make_no_circle() -> None:
    names = {name_of(path) for path in MODULES}
    left = {name_of(path): {module for module in imports_of(path)[0] if module in names} for path in MODULES}
    while left:
        free = {module for module, others in left.items() if not others & set(left)}
        assert free, f"circle among {sorted(left)}"
        left = {module: others for module, others in left.items() if module not in free}
