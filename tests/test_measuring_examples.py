"""The examples that measure: what they print is what they say it is."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from transformers_gumiho import GumihoConfig


EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_time_of_the_target_in_a_cycle_is_most_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("measure_context", monkeypatch)
    args = example.ContextArguments(lengths=[32], max_new_tokens=32, repeats=1)
    target, gumiho, text = example.load(args)
    _, cycle, verify = example.measure_milliseconds(target, gumiho, text[None, :32], args)
    assert 0.4 * cycle < verify < cycle


def test_a_cycle_is_measured_in_plain_steps(tmp_path: Path) -> None:
    config = GumihoConfig.from_pretrained(EXAMPLES / "demo_pair" / "gumiho")
    config.save_pretrained(tmp_path)
    output = subprocess.run(
        [
            sys.executable, str(EXAMPLES / "measure_shape.py"), "--assistant", str(tmp_path), "--num_layers", "2",
            "--device", "cpu", "--dtype", "float32", "--nodes", "4", "8", "--context", "8", "--repeats", "1",
            "--max_new_tokens", "8", "--no_compile",
        ],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    step = float(re.search(r"plain step: ([\d.]+) ms", output)[1])
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) ms \| ([\d.]+) \|$", output, flags=re.M)
    assert [int(size) for size, _, _ in rows] == [4, 8]
    for _, cycle, ratio in rows:
        assert float(ratio) == pytest.approx(float(cycle) / step, rel=0.02)


def test_bound_is_that_of_the_weights_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("measure_shape", monkeypatch)
    config = json.loads((EXAMPLES.parent / "hub_configs/Gumiho-llama3-8b/config.json").read_text())["model"]
    width, vocab_size = config["hidden_size"], config["vocab_size"]
    target, gumiho = example.make_pair(example.ShapeArguments(device="meta", draft_vocabulary=32_768))
    of_target, of_drafter = example.bytes_read(target, gumiho)
    # Queries and outputs, keys and values of a quarter of the heads, the MLP, and the norms before both.
    layer = width * (2 * width + width // 2 + 3 * config["intermediate_size"] + 2)
    assert of_target == 2 * (32 * layer + width + vocab_size * width)
    heads = sum(parameter.numel() for parameter in gumiho.mlp.parameters())
    # The first serial layer has no norm before its attention.
    serial = 2 * layer - width
    assert of_drafter == 2 * (2 * serial + 3 * (2 * width + 1) * width + heads + 3 * 32_768 * width)
