"""The rooms of the package, and the only directions in which imports go between them."""

import ast
from pathlib import Path

import pytest

import transformers_gumiho


ROOT = Path(transformers_gumiho.__file__).parent

# What each module may import from the package. A module of a room sees the rooms before it, never those after.
ALLOWED = {
    "released_configs": set(),
    "configuration_gumiho": {"released_configs"},
    "checkpoint_loading": {"configuration_gumiho"},
    "parallel_heads": {"configuration_gumiho"},
    "unrolling": set(),
    "draft_vocabulary": set(),
    "saving": set(),
    "placement": set(),
    "modeling_gumiho": {
        "checkpoint_loading", "configuration_gumiho", "draft_vocabulary", "parallel_heads", "released_configs",
        "saving", "unrolling",
    },
    "output_head": set(),
    "tree": set(),
    "recombination": {"tree"},
    "verification": {"tree"},
    "cache": set(),
    "losses": {"configuration_gumiho", "modeling_gumiho"},
    "compilation": set(),
    "drafting_settings": {"configuration_gumiho", "draft_vocabulary", "modeling_gumiho"},
    "drafting": {
        "compilation", "drafting_settings", "modeling_gumiho", "parallel_heads", "recombination", "tree",
    },
    "candidate_generator": {"modeling_gumiho", "drafting", "drafting_settings", "tree"},
    # The generation loop is one room of several files.
    "compatibility": {"modeling_gumiho", "cache"},
    "target": {"tree", "cache", "compatibility", "compilation"},
    "sequences": set(),
    "sampling_noise": set(),
    "choosing": {"compilation", "sampling_noise", "sequences", "tree", "verification"},
    "generation": {
        "modeling_gumiho", "drafting", "candidate_generator", "tree", "cache", "compatibility", "target", "sequences",
        "choosing", "compilation", "drafting_settings", "output_head",
    },
    "__init__": {
        "checkpoint_loading", "configuration_gumiho", "modeling_gumiho", "drafting_settings", "candidate_generator",
        "generation",
    },
    # The code in a drafter's repository imports this, and gets the package with it.
    "custom_generation": {"modeling_gumiho", "placement"},
    # Training imports nothing of the generation side.
    "training.chunked_loss": {"losses", "modeling_gumiho"},
    "training.arguments": {"losses", "training.chunked_loss"},
    "training.agreement": {"losses", "modeling_gumiho", "training.chunked_loss"},
    "training.target_features": {"output_head"},
    "training.collator": set(),
    "training.conversations": set(),
    "training.rendering": {"training.conversations"},
    "training.preparation": {"training.conversations", "training.rendering"},
    "training.regeneration": {
        "training.conversations", "training.fingerprint", "training.preparation", "training.rendering",
    },
    "training.fingerprint": set(),
    "training.feature_cache": {"modeling_gumiho", "output_head", "training.fingerprint"},
    "training.feature_extraction": {
        "training.collator", "training.feature_cache", "training.fingerprint", "training.target_features",
    },
    "training.checkpoints": set(),
    "training.callbacks": {"modeling_gumiho"},
    "training.model_card": set(),
    "training.trainer": {
        "losses", "modeling_gumiho", "training.agreement", "training.arguments", "training.callbacks",
        "training.checkpoints", "training.chunked_loss", "training.collator", "training.feature_cache",
        "training.model_card", "training.target_features",
    },
    "training.__init__": {
        "losses", "training.agreement", "training.arguments", "training.callbacks", "training.checkpoints",
        "training.chunked_loss", "training.collator", "training.conversations", "training.feature_cache",
        "training.feature_extraction", "training.preparation", "training.regeneration", "training.rendering",
        "training.target_features", "training.trainer",
    },
    # The benchmark sees everything, and nothing sees it but the command line.
    "benchmarking.prompts": {"training.conversations"},
    "benchmarking.modes": {"modeling_gumiho"},
    "benchmarking.memory": set(),
    "benchmarking.stages": {"candidate_generator", "drafting", "modeling_gumiho", "target"},
    "benchmarking.runner": {
        "benchmarking.memory", "benchmarking.modes", "benchmarking.prompts", "benchmarking.stages",
    },
    "benchmarking.summary": {"benchmarking.modes", "benchmarking.runner", "metrics"},
    "benchmarking.report": {"benchmarking.modes", "benchmarking.summary"},
    "benchmarking.plots": {"benchmarking.modes", "benchmarking.summary"},
    "benchmarking.loading": {"modeling_gumiho", "placement"},
    "benchmarking.command": {
        "benchmarking.loading", "benchmarking.modes", "benchmarking.plots", "benchmarking.prompts",
        "benchmarking.report", "benchmarking.runner", "benchmarking.summary",
    },
    "benchmarking.__init__": {
        "benchmarking.command", "benchmarking.modes", "benchmarking.prompts", "benchmarking.runner",
        "benchmarking.summary",
    },
    # Tuning asks what drafts the heads make of a text as the losses do, and times what the benchmark times.
    "tuning.acceptance": {"benchmarking.modes", "benchmarking.stages", "choosing", "modeling_gumiho", "tree"},
    "tuning.answers": {"modeling_gumiho"},
    "tuning.arguments": set(),
    "tuning.calibration": {"losses", "modeling_gumiho", "output_head", "tuning.answers"},
    "tuning.timing": {"benchmarking.modes", "benchmarking.stages", "modeling_gumiho", "target"},
    "tuning.costs": {"benchmarking.stages", "modeling_gumiho", "tuning.timing"},
    "tuning.search": {"tuning.acceptance", "tuning.costs"},
    "tuning.contest": {"modeling_gumiho", "tuning.search", "tuning.timing"},
    "tuning.counting": {"tuning.answers"},
    "tuning.vocabulary": {
        "modeling_gumiho", "tuning.acceptance", "tuning.answers", "tuning.contest", "tuning.costs", "tuning.counting",
        "tuning.search",
    },
    "tuning.result": {"tuning.costs", "tuning.search", "tuning.vocabulary"},
    "tuning.finding": {
        "drafting_settings", "modeling_gumiho", "tuning.acceptance", "tuning.answers", "tuning.arguments",
        "tuning.calibration", "tuning.contest", "tuning.costs", "tuning.result", "tuning.search",
        "tuning.vocabulary",
    },
    "tuning.command": {
        "benchmarking.loading", "benchmarking.prompts", "tuning.arguments", "tuning.finding", "tuning.result",
    },
    "tuning.__init__": {
        "tuning.acceptance", "tuning.answers", "tuning.arguments", "tuning.calibration", "tuning.command",
        "tuning.contest", "tuning.costs", "tuning.counting", "tuning.finding", "tuning.result", "tuning.search",
        "tuning.vocabulary",
    },
    # What people are shown of a generation; nothing sees it but the command line.
    "presenting.arguments": set(),
    "presenting.colours": set(),
    "presenting.cycles": {"benchmarking.stages", "choosing", "tree", "verification"},
    "presenting.labels": {"presenting.cycles"},
    "presenting.streaming": {"presenting.colours", "presenting.cycles"},
    "presenting.answering": {
        "modeling_gumiho", "presenting.colours", "presenting.cycles", "presenting.streaming",
    },
    "presenting.terminal_tree": {"presenting.colours", "presenting.cycles", "presenting.labels"},
    "presenting.tree_picture": {"presenting.cycles", "presenting.labels"},
    "presenting.command": {
        "benchmarking.loading", "benchmarking.prompts", "drafting_settings", "modeling_gumiho",
        "presenting.answering", "presenting.arguments", "presenting.colours", "presenting.cycles",
        "presenting.labels", "presenting.terminal_tree", "presenting.tree_picture",
    },
    "presenting.__init__": {
        "presenting.answering", "presenting.arguments", "presenting.command", "presenting.cycles",
        "presenting.labels", "presenting.streaming", "presenting.terminal_tree",
    },
    "cli": {"benchmarking", "benchmarking.report", "presenting", "tuning"},
    "metrics.acceptance": set(),
    "metrics.acceptance_length": set(),
    "metrics.__init__": {"metrics.acceptance"},
}  # fmt: skip
TORCH_ONLY = ("tree", "verification")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports_of(path: Path) -> tuple[set[str], set[str]]:
    """Returns the modules of the package and the packages outside it that a file imports."""
    inside, outside = set(), set()
    folder = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
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
    assert {module_name(path) for path in ROOT.rglob("*.py")} == set(ALLOWED)


@pytest.mark.parametrize("module", list(ALLOWED))
def test_imports_go_the_way_of_the_picture(module: str) -> None:
    inside, outside = imports_of(ROOT.joinpath(*module.split(".")).with_suffix(".py"))
    assert inside <= ALLOWED[module]
    # evaluate copies its metric elsewhere, where a relative import would lead nowhere.
    assert ("transformers_gumiho" in outside) == (module == "metrics.acceptance_length")
    if module in TORCH_ONLY:
        assert "transformers" not in outside
