"""The scripts that measure: what they print is what they say it is."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gpu_check
import measure_agreement
import measure_recurrent
import measure_shape
import numpy as np
import pytest
import recipe_table
import sweep_architectures
import torch
import transformers
from training_data import DEMO_TARGET, write_jsonl
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from transformers_gumiho import GumihoConfig, GumihoModel
from transformers_gumiho.generation.verification import session
from transformers_gumiho.training.recipe.options import read_options
from transformers_gumiho.training.unrolling import unroll_serial_head


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


def test_recorded_drafts_are_replayed_on_a_hybrid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure_recurrent, "SIZE", measure_recurrent.SIZE | {"hidden_size": 32})
    traces = tmp_path / "traces.jsonl"
    options = ("--traces", traces, "--trees", 8, "--max_new_tokens", 24)
    run(measure_recurrent, monkeypatch, *options, "--record", "--num_prompts", 1)
    run(measure_recurrent, monkeypatch, *options, "--kinds", "qwen3_5_text", "--repeats", 1)
    row = r"^\| qwen3_5_text \| ([a-z0-9 ]+) \| .* \| ([\d.]+) \| (yes|NO) \|$"
    found = re.findall(row, capsys.readouterr().out, flags=re.M)
    assert [name for name, *_ in found] == ["plain", "chain of 7", "tree of 8"]
    assert {equal for *_, equal in found} == {"yes"}
    # The texts end within a cycle, so that tau differs a little from the recorded one.
    for (_, tau, _), line in zip(found[1:], traces.read_text().splitlines(), strict=True):
        lengths = [len(cycle["accepted"]) for cycle in json.loads(line)["trace"]]
        assert float(tau) == pytest.approx(sum(lengths) / len(lengths), rel=0.1)


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


def test_a_section_that_fails_or_comes_late_is_not_run() -> None:

    def failing() -> Iterator[tuple[str, str]]:
        yield "half", "done"
        raise RuntimeError("out of memory\nand more")

    assert gpu_check.run(failing, is_late=False) == [("not run", "RuntimeError: out of memory")]
    assert gpu_check.run(lambda: iter([("a", "b")]), is_late=True) == [("not run", "no time left")]
    assert gpu_check.run(lambda: iter([("a", "b")]), is_late=False) == [("a", "b")]


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


def test_a_model_type_that_takes_too_long_does_not_stop_the_sweep() -> None:

    def compute(seconds: float) -> dict[str, str]:
        start = time.process_time()
        while time.process_time() - start < seconds:
            pass
        return {"verdict": "tree"}

    assert sweep_architectures.in_own_process(compute, 0.0, limit=1) == {"verdict": "tree"}
    assert sweep_architectures.in_own_process(compute, 9.0, limit=1)["why"] == "crashed, or computed for more than 1 s"


def test_what_is_not_equal_is_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep's own verdicts: of a target that verifies trees, and of one whose mask hides nothing."""
    settings = {"max_new_tokens": 24, "min_new_tokens": 24}
    result = sweep_architectures.compare(sweep_architectures.build("llama"), settings)
    assert result["verdict"] == "tree"
    assert result["tau"] > 2
    assert result["num_tokens"] > 3
    monkeypatch.setattr(session, "_tree_masks", lambda tree, cache, dtype, windows, _: dict.fromkeys(windows))
    assert sweep_architectures.compare(sweep_architectures.build("llama"), settings)["verdict"] == "differs"


def test_agreement_counts_the_tokens_of_the_answers(pair: tuple[Any, Any, GumihoModel]) -> None:
    """Up to the token that ends them, in batches of answers of different lengths."""
    target, tokenizer, _ = pair
    texts = ["def read(self):", "import os", "class Path:\n    def"]
    alone = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        alone.append((ids.shape[1], target.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()))
    args = measure_agreement.AgreementArguments(assistants=[], prompts="", max_new_tokens=12, batch_size=2)
    questions = [measure_agreement.Question(str(i), "all", (text,)) for i, text in enumerate(texts)]
    length, tokens = alone[0]
    end = tokens[length + 4]  # one of the texts ends early
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target.generation_config, "eos_token_id", end)
        rows = measure_agreement.answer(args, target, tokenizer, questions)
    expected = []
    for length, tokens in alone:
        stop = next((i + 1 for i in range(length, len(tokens)) if tokens[i] == end), len(tokens))
        expected.append((tokens[:stop], [0] * length + [1] * (stop - length - 1) + [0]))
    assert [(row["input_ids"], row["loss_mask"]) for row in rows] == expected
    assert len({len(tokens) - length for (length, _), (tokens, _) in zip(alone, expected, strict=True)}) > 1


def test_agreement_is_the_share_of_drafts_that_are_the_targets_choice(
    pair: tuple[Any, Any, GumihoModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of each depth, by category, on the target's own answers, among the tokens that may be drafted."""
    target, tokenizer, drafter = pair
    vocabulary = torch.tensor(drafter.generation_config.draft_vocabulary)
    questions = [("a", "def read(self):"), ("b", "class Path:\n    def"), ("a", "    def test_empty(self):\n")]
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"category": c, "prompt": text} for c, text in questions])
    run(
        measure_agreement, monkeypatch, "--target", DEMO_PAIR / "target", "--assistants", DEMO_PAIR / "gumiho",
        "--prompts", prompts, "--dtype", "float32", "--max_new_tokens", 24,
    )  # fmt: skip
    printed = re.findall(r"^\| ([ab]) \| (\d+) \| (.*) \|$", capsys.readouterr().out, re.MULTILINE)
    right: dict[str, list[list[bool]]] = {"a": [[] for _ in range(7)], "b": [[] for _ in range(7)]}
    with torch.inference_mode():
        for category, text in questions:
            prompt = tokenizer(text, return_tensors="pt").input_ids
            ids = target.generate(prompt, max_new_tokens=24, do_sample=False)
            states = target.model(ids).last_hidden_state
            output = drafter(ids[:, 1:], states[:, :-1], unroll=unroll_serial_head)
            features = [output.serial_features, output.unrolled_features[0], *output.parallel_features.unbind(1)]
            for depth, predicted in enumerate(features, start=1):
                drafts = vocabulary[target.lm_head(predicted)[0, :, vocabulary].argmax(dim=-1)]
                # The draft after token i is said to be token i + depth + 1; the answer's first token is no draft.
                for place in range(max(prompt.shape[1] + 1, depth + 1), ids.shape[1]):
                    right[category][depth - 1].append(bool(drafts[place - depth - 1] == ids[0, place]))
    expected = [
        (category, str(len(shares[0])), [sum(share) / len(share) for share in shares])
        for category, shares in right.items()
    ]
    assert [(name, count) for name, count, _ in printed] == [(name, count) for name, count, _ in expected]
    for (_, _, row), (_, _, shares) in zip(printed, expected, strict=True):
        assert [float(share) for share in row.split(" | ")] == pytest.approx(shares, abs=6e-4)
    assert expected[0][2] != expected[1][2]


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
