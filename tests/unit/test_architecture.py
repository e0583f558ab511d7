"""The rooms of the package, and the only directions in which imports go between them."""

import ast
from pathlib import Path

import pytest

import transformers_gumiho


ROOT = Path(transformers_gumiho.__file__).parent

# For each room the others that it may import; all may import `user_errors`. Within a room imports are free, as long
# as they make no circle.
ROOMS: dict[str, set[str]] = {
    "internals": set(),
    "uploads": set(),
    "tree": {"uploads"},
    "model": {"internals"},
    "verification": {"internals", "uploads", "tree", "model"},
    "losses": {"internals", "model", "verification"},
    "drafting": {"internals", "uploads", "tree", "model", "verification"},
    "decoding": {"internals", "uploads", "tree", "model", "verification", "drafting"},
    "training": {
        "internals",
        "model",
        "verification",
        "losses",
        "decoding",
        "open_text",
        "resumable_file",
        "text_files",
        "options",
    },
    "metrics": set(),
    "pairs": {"model", "verification", "drafting", "open_text", "options"},
    "measuring": {"internals", "model", "verification", "drafting", "decoding", "open_text", "text_files"},
    "benchmarking": {
        "internals",
        "model",
        "verification",
        "measuring",
        "metrics",
        "pairs",
        "options",
        "resumable_file",
    },
    "tuning": {"model", "verification", "drafting", "measuring", "pairs", "options"},
    "recipe": {
        "model",
        "training",
        "measuring",
        "benchmarking",
        "tuning",
        "pairs",
        "open_text",
        "options",
        "resumable_file",
        "text_files",
    },
    "presenting": {
        "internals",
        "tree",
        "model",
        "verification",
        "drafting",
        "decoding",
        "measuring",
        "pairs",
        "options",
    },
    "vllm": {"model"},
    "custom_generation": {"internals", "model", "decoding", "training"},
    "serving_folder": {"decoding", "options"},
    "__init__": {"internals", "model", "verification", "drafting", "decoding", "training"},
    "open_text": {"text_files"},
    "options": set(),
    "text_files": set(),
    "user_errors": set(),
    "resumable_file": set(),
    "cli": {
        "__version__",
        "internals",
        "benchmarking",
        "options",
        "presenting",
        "recipe",
        "serving_folder",
        "tuning",
    },
}
MODULES = sorted(ROOT.rglob("*.py"))


def room_of(module: str) -> str:
    return module.split(".")[0]


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
    assert {room_of(module) for module in inside} - {room} <= ROOMS[room] | {"user_errors"}
    # evaluate copies its metric elsewhere, where a relative import would lead nowhere.
    assert ("transformers_gumiho" in outside) == (name_of(path) == "metrics.acceptance_length")
    if room == "tree":
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
