"""The scripts that measure: what they print is what they say it is."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import gpu_check
import measure_shape
import numpy as np
import pytest
import recipe_table
import sweep_architectures
import torch
import transformers
from training_data import DEMO_TARGET
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from transformers_gumiho import GumihoConfig
from transformers_gumiho.generation.verification import session
from transformers_gumiho.training.recipe.options import read_options


ROOT = Path(__file__).parents[2]
DEMO_PAIR = DEMO_TARGET.parent


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """Runs a script in this process."""
    monkeypatch.setattr(sys, "argv", list(map(str, [script.__file__, *words])))
    script.main()


def test_a_cycle_is_measured_in_plain_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    GumihoConfig.from_pretrained(DEMO_PAIR / "gumiho").save_pretrained(tmp_path)
    run(
        measure_shape, monkeypatch, "--assistant", tmp_path, "--num_layers", 2, "--device", "cpu", "--dtype",
        "float32", "--nodes", 4, 8, "--context", 8, "--repeats", 1, "--max_new_tokens", 8, "--no_compile",
    )  # fmt: skip
    output = capsys.readouterr().out
    step = float(re.search(r"plain step: ([\d.]+) ms", output)[1])
    rows = re.findall(r"^\| (\d+)" + 2 * r" \| ([\d.]+) ms \| ([\d.]+)" + r" \|$", output, flags=re.M)
    assert [int(size) for size, *_ in rows] == [4, 8]
    for _, *ways in rows:
        for cycle, ratio in zip(ways[::2], ways[1::2], strict=True):
            assert float(ratio) == pytest.approx(float(cycle) / step, rel=0.02)


def test_a_gpu_is_checked_in_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(gpu_check, monkeypatch, "--toy", "--json", tmp_path / "found.json")
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", capsys.readouterr().out, flags=re.M)[1:]
    sections = json.loads((tmp_path / "found.json").read_text())["sections"]
    assert rows == [(name, *row) for name, section in sections.items() for row in section.items()]
    assert list(sections) == ["shape, eager", "shape, compiled", "training", "pair smollm2", "pair demo", "GPU tests"]
    assert sections["pair smollm2"] == {"not run": "too large for a toy"}
    if not torch.cuda.is_available():
        assert sections["GPU tests"] == {"not run": "no GPU"}
        assert list(sections["shape, compiled"]) == ["not run"]
    for way in ("in place", "copied", "without cuDNN"):
        assert sections["shape, eager"][f"cycle of 7 nodes, {way}"].endswith("plain steps")
    assert sections["training"]["rows of 32 tokens, float32"].endswith("tokens/s")
    assert sections["pair demo"]["equal to plain"] == "1 of 1"


def test_bound_is_that_of_the_weights_that_are_read() -> None:
    config = json.loads((ROOT / "hub_configs/Gumiho-llama3-8b/config.json").read_text())["model"]
    width, vocab_size = config["hidden_size"], config["vocab_size"]
    target, gumiho = measure_shape.make_pair(measure_shape.ShapeArguments(device="meta", draft_vocabulary=32_768))
    of_target, of_drafter = measure_shape.bytes_read(target, gumiho)
    # Queries and outputs, keys and values of a quarter of the heads, the MLP, and the norms before both.
    layer = width * (2 * width + width // 2 + 3 * config["intermediate_size"] + 2)
    assert of_target == 2 * (32 * layer + width + vocab_size * width)
    heads = sum(parameter.numel() for parameter in gumiho.mlp.parameters())
    # The first serial layer has no norm before its attention.
    serial = 2 * layer - width
    assert of_drafter == 2 * (2 * serial + 3 * (2 * width + 1) * width + heads + 3 * 32_768 * width)


def test_the_table_of_targets_has_a_row_for_every_model_type() -> None:
    text = (ROOT / "benchmarks" / "reports" / "2026-11-model-types.md").read_text(encoding="utf-8")
    version, number = re.search(r"^transformers ([\d.]+), (\d+) model types:", text, flags=re.M).groups()
    rows = re.findall(r"^\| `([\w-]+)` \| (tree|chain|refused|differs|fails|not built) \|", text, flags=re.M)
    assert len(rows) == len(dict(rows)) == int(number)
    if version == transformers.__version__:
        assert dict(rows).keys() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_what_is_not_equal_is_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep's own verdicts: of a target that verifies trees, and of one whose mask hides nothing."""
    settings = {"max_new_tokens": 24, "min_new_tokens": 24}
    result = sweep_architectures.compare(sweep_architectures.build("llama"), settings)
    assert result["verdict"] == "tree"
    assert result["tau"] > 2
    assert result["num_tokens"] > 3
    monkeypatch.setattr(session, "_tree_masks", lambda tree, cache, dtype, windows, _: dict.fromkeys(windows))
    assert sweep_architectures.compare(sweep_architectures.build("llama"), settings)["verdict"] == "differs"


def test_gains_are_over_the_published_recipe(tmp_path: Path) -> None:
    def write(recipe: str, seed: int, lengths: list[list[int]]) -> None:
        folder = tmp_path / f"{recipe}-{seed}" / "benchmark"
        folder.mkdir(parents=True)
        samples = [{"mode": "plain", "temperature": 0.0, "accepted_lengths": None}]
        samples += [{"mode": "tree of 63", "temperature": 0.0, "accepted_lengths": [row]} for row in lengths]
        (folder / "samples.jsonl").write_text(json.dumps({"samples": samples}) + "\n")

    write("published", 0, [[2, 2], [2, 2]])
    write("published", 1, [[2, 2], [2, 2]])
    write("linear-start", 0, [[3, 3, 3], [3, 3, 3]])
    write("linear-start", 1, [[2, 2, 2, 2, 1], [2, 2, 2, 2, 1]])
    counts = recipe_table.read_counts(tmp_path)
    assert np.array_equal(counts["linear-start"]["tree of 63", 0.0], [[[9, 3]] * 2, [[9, 5]] * 2])
    # 36 tokens in 16 cycles, and each seed alone.
    assert recipe_table.table(counts).splitlines()[2:] == [
        "| `linear-start` | 2 | 2.25 | +12.5% (-10.0 to +50.0) |", "| `published` | 2 | 2.00 |  |",
    ]  # fmt: skip


def test_the_compared_recipes_are_options_of_the_command() -> None:
    script = (ROOT / "benchmarks" / "compare_recipes.sh").read_text(encoding="utf-8")
    (cross_entropy,) = re.findall(r'^cross_entropy="(.*)"$', script, flags=re.M)
    options = dict(re.findall(r'^    \[(\w+)\]="(.*)"$', script, flags=re.M))
    assert set(options) == set(re.search(r"RECIPES:-([^}]*)}", script)[1].replace("\\", "").split())
    for given in options.values():
        words = given.replace("$cross_entropy", cross_entropy).split()
        read_options(["--use_cpu", "--output_dir", "x", "--recipe", "published", *words], "")
    subprocess.run(["bash", "-n", ROOT / "benchmarks" / "compare_recipes.sh"], check=True)
