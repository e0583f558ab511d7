"""The scripts that measure: what they print is what they say it is."""

import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from cycle_costs import make_cost_table
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from transformers_gumiho import GumihoConfig, GumihoModel
from transformers_gumiho.decoding.observers import GenerationObserver, observing
from transformers_gumiho.drafting.tree_size import ContextRun, SizeChoice, SizeReason
from transformers_gumiho.target import session
from transformers_gumiho.tree.draft_tree import choose_nodes
from transformers_gumiho.tuning.timing import DecodingTime


ROOT = Path(__file__).parents[2]


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_growth_with_the_context_is_that_within_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("measure_context", monkeypatch)

    def plain(_: Any, ids: torch.Tensor, **__: Any) -> DecodingTime:
        return DecodingTime(num_tokens=50, seconds=0.001 * ids.shape[1])

    def drafted(_: Any, __: Any, ids: torch.Tensor, *___: Any, **____: Any) -> DecodingTime:
        return DecodingTime(
            num_tokens=50, seconds=9.0, num_cycles=10, cycle_seconds=0.002 * ids.shape[1], verify_seconds=0.03
        )

    monkeypatch.setattr(script, "time_plain", plain)
    monkeypatch.setattr(script, "time_drafted", drafted)
    args = script.ContextArguments(lengths=[16, 48], rounds=2)
    times = script.measure_times(None, None, torch.arange(99), args)
    assert torch.tensor(times).allclose(torch.tensor([[[0.32, 32.0, 30.0], [0.96, 96.0, 30.0]]] * 2))
    # A machine that takes three times as long in one of three rounds.
    monkeypatch.setattr(script, "memory_of", lambda part, length: {"plain": 20.0, "drafted": 25.0}[part])
    rounds = [[[8 * slow, 16 * slow, 12 * slow], [10 * slow, 24 * slow, 18 * slow]] for slow in (1, 3, 1)]
    assert script.report(48, rounds, 1) == (
        "| 48 | 10.00 ms | 24.00 ms | 18.00 ms | 1.25x (1.25-1.25) | 1.50x (1.50-1.50) | 1.20x (1.20-1.20) | 20 MB | "
        "25 MB (1.25x) |"
    )


def test_a_cycle_is_measured_in_plain_steps(tmp_path: Path) -> None:
    config = GumihoConfig.from_pretrained(ROOT / "examples" / "demo_pair" / "gumiho")
    config.save_pretrained(tmp_path)
    output = subprocess.run(
        [
            sys.executable, str(ROOT / "benchmarks" / "measure_shape.py"), "--assistant", str(tmp_path),
            "--num_layers", "2", "--device", "cpu", "--dtype", "float32", "--nodes", "4", "8", "--context", "8",
            "--repeats", "1", "--max_new_tokens", "8", "--no_compile",
        ],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    step = float(re.search(r"plain step: ([\d.]+) ms", output)[1])
    rows = re.findall(r"^\| (\d+)" + 2 * r" \| ([\d.]+) ms \| ([\d.]+)" + r" \|$", output, flags=re.M)
    assert [int(size) for size, *_ in rows] == [4, 8]
    for _, *ways in rows:
        for cycle, ratio in zip(ways[::2], ways[1::2], strict=True):
            assert float(ratio) == pytest.approx(float(cycle) / step, rel=0.02)


def test_a_gpu_is_checked_in_one_table(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    script = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--toy", "--json", str(path)]
    output = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", output, flags=re.M)[1:]
    sections = json.loads(path.read_text())["sections"]
    assert rows == [(name, *row) for name, section in sections.items() for row in section.items()]
    assert list(sections) == ["GPU tests", "shape, eager", "shape, compiled", "training", "pair demo", "pair smollm2"]
    assert sections["pair smollm2"] == {"not run": "too large for a toy"}
    if not torch.cuda.is_available():
        assert sections["GPU tests"] == {"not run": "no GPU"}
        assert list(sections["shape, compiled"]) == ["not run"]
    for way in ("in place", "copied", "without cuDNN"):
        assert sections["shape, eager"][f"cycle of 7 nodes, {way}"].endswith("plain steps")
    assert sections["training"]["rows of 32 tokens, float32"].endswith("tokens/s")
    assert sections["pair demo"]["equal to plain"] == "1 of 1"


def test_a_section_that_fails_or_comes_late_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("gpu_check", monkeypatch)

    def failing() -> Iterator[tuple[str, str]]:
        yield "half", "done"
        raise RuntimeError("out of memory\nand more")

    assert script.run(failing, is_late=False) == [("not run", "RuntimeError: out of memory")]
    assert script.run(lambda: iter([("a", "b")]), is_late=True) == [("not run", "no time left")]
    assert script.run(lambda: iter([("a", "b")]), is_late=False) == [("a", "b")]


def test_a_cycle_is_measured_with_and_without_copies() -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "measure_attention.py")]
    options = ["--lengths", "96", "--num_layers", "2", "--nodes", "4", "--cycles", "4", "--rounds", "1"]
    output = subprocess.run([*script, *options], check=True, capture_output=True, text=True).stdout
    row = re.search(r"^\| 96 \| ([\d.]+) ms \| ([\d.]+) ms \| ([\d.]+)x \| \d+ MB \| \d+ MB \|$", output, flags=re.M)
    copied, in_place, gain = map(float, row.groups())
    assert gain == pytest.approx(copied / in_place, rel=0.05)


def test_bound_is_that_of_the_weights_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("measure_shape", monkeypatch)
    config = json.loads((ROOT / "hub_configs/Gumiho-llama3-8b/config.json").read_text())["model"]
    width, vocab_size = config["hidden_size"], config["vocab_size"]
    target, gumiho = script.make_pair(script.ShapeArguments(device="meta", draft_vocabulary=32_768))
    of_target, of_drafter = script.bytes_read(target, gumiho)
    # Queries and outputs, keys and values of a quarter of the heads, the MLP, and the norms before both.
    layer = width * (2 * width + width // 2 + 3 * config["intermediate_size"] + 2)
    assert of_target == 2 * (32 * layer + width + vocab_size * width)
    heads = sum(parameter.numel() for parameter in gumiho.mlp.parameters())
    # The first serial layer has no norm before its attention.
    serial = 2 * layer - width
    assert of_drafter == 2 * (2 * serial + 3 * (2 * width + 1) * width + heads + 3 * 32_768 * width)


def test_the_table_of_targets_has_a_row_for_every_model_type() -> None:
    text = (ROOT / "docs" / "targets.md").read_text(encoding="utf-8")
    version, number = re.search(r"^transformers ([\d.]+), (\d+) model types:", text, flags=re.M).groups()
    rows = re.findall(r"^\| `([\w-]+)` \| (tree|chain|refused|differs|fails|not built) \|", text, flags=re.M)
    assert len(rows) == len(dict(rows)) == int(number)
    if version == transformers.__version__:
        assert dict(rows).keys() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_a_model_type_that_takes_too_long_does_not_stop_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("sweep_architectures", monkeypatch)

    def compute(seconds: float) -> dict[str, str]:
        start = time.process_time()
        while time.process_time() - start < seconds:
            pass
        return {"verdict": "tree"}

    assert script.in_own_process(compute, 0.0, limit=1) == {"verdict": "tree"}
    assert script.in_own_process(compute, 9.0, limit=1)["why"] == "crashed, or computed for more than 1 s"


def test_what_is_not_equal_is_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep's own verdicts: of a target that verifies trees, and of one whose mask hides nothing."""
    script = load("sweep_architectures", monkeypatch)
    settings = {"max_new_tokens": 24, "min_new_tokens": 24}
    result = script.compare(script.build("llama"), settings)
    assert result["verdict"] == "tree"
    assert result["tau"] > 2
    assert result["num_tokens"] > 3
    monkeypatch.setattr(session, "_tree_masks", lambda tree, cache, dtype, windows, _: dict.fromkeys(windows))
    assert script.compare(script.build("llama"), settings)["verdict"] == "differs"


def test_agreement_counts_the_tokens_of_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the token that ends them, in batches of answers of different lengths."""
    script = load("measure_agreement", monkeypatch)
    folder = ROOT / "examples" / "demo_pair" / "target"
    target = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["def read(self):", "import os", "class Path:\n    def"]
    alone = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        alone.append((ids.shape[1], target.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()))
    # One of the texts ends early.
    length, tokens = alone[0]
    target.generation_config.eos_token_id = end = tokens[length + 4]
    expected = []
    for length, tokens in alone:
        stop = next((i + 1 for i in range(length, len(tokens)) if tokens[i] == end), len(tokens))
        expected.append((tokens[:stop], [0] * length + [1] * (stop - length - 1) + [0]))
    args = script.AgreementArguments(str(folder), [], "", max_new_tokens=12, batch_size=2)
    questions = [script.Question(str(i), "all", (text,)) for i, text in enumerate(texts)]
    rows = script.answer(args, target, questions)
    assert [(row["input_ids"], row["loss_mask"]) for row in rows] == expected
    assert len({len(tokens) - length for (length, _), (tokens, _) in zip(alone, expected, strict=True)}) > 1


def test_agreement_is_the_share_of_drafts_that_are_the_targets_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each depth, by category, on the target's own answers, among the tokens that may be drafted."""
    script = load("measure_agreement", monkeypatch)
    pair = ROOT / "examples" / "demo_pair"
    target = transformers.AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(pair / "target")
    drafter = GumihoModel.from_pretrained(pair / "gumiho", dtype=torch.float32)
    vocabulary = torch.tensor(drafter.generation_config.draft_vocabulary)
    questions = [("a", "def read(self):"), ("b", "class Path:\n    def"), ("a", "    def test_empty(self):\n")]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"category": c, "prompt": text}) + "\n" for c, text in questions))
    argv = ["--target", pair / "target", "--assistants", pair / "gumiho", "--prompts", prompts, "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", [*map(str, ["measure_agreement.py", *argv]), "--max_new_tokens", "24"])
    script.main()
    printed = re.findall(r"^\| ([ab]) \| (\d+) \| (.*) \|$", capsys.readouterr().out, re.MULTILINE)
    right: dict[str, list[list[bool]]] = {"a": [[] for _ in range(7)], "b": [[] for _ in range(7)]}
    with torch.inference_mode():
        for category, text in questions:
            prompt = tokenizer(text, return_tensors="pt").input_ids
            ids = target.generate(prompt, max_new_tokens=24, do_sample=False)
            states = target.model(ids).last_hidden_state
            output = drafter(ids[:, 1:], states[:, :-1], unroll=True)
            features = [output.serial_features, output.unrolled_features[0], *output.parallel_features.unbind(1)]
            for depth, predicted in enumerate(features, start=1):
                drafts = vocabulary[target.lm_head(predicted)[0, :, vocabulary].argmax(dim=-1)]
                # The draft behind token i is said to be token i + depth + 1; the answer's first token is no draft.
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


def test_the_bound_of_sizes_is_the_best_of_all_ways_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """On texts of eight places with random drafts, against every sequence of sizes."""
    script = load("bound_sizes", monkeypatch)
    generator = torch.Generator().manual_seed(0)
    costs = script.BatchCosts((0, 1, 3), (1.2, 1.3, 2.0), (0.3, 0.3, 0.5), 1.0)

    def number_below(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    def tree() -> Any:
        scores = torch.rand(1, 3, generator=generator).sort().values.neg()
        tokens = torch.tensor([[0, *torch.randperm(3, generator=generator).tolist()]])
        parents = torch.tensor([[0, 0, number_below(2), number_below(3)]])
        return choose_nodes(tokens, torch.cat((torch.zeros(1, 1), scores), dim=1), parents, 3, 3)

    def is_accepted(text: Any, place: int, node: int) -> bool:
        tree, path = text.trees[place], []
        while node:
            path.insert(0, int(tree.tokens[0, node]))
            node = int(tree.parents[0, node])
        return text.tokens[place + 1 :][: len(path)] == path

    def best_ms(text: Any, place: int = 0) -> float:
        """The least time from a place on."""
        if place == 8:
            return 0.0
        accepted = [is_accepted(text, place, node) for node in (1, 2, 3)]
        cycles = [(costs.cycle_ms(size), min(1 + sum(accepted[:size]), 8 - place)) for size in range(4)]
        return min(float(ms) + best_ms(text, place + tokens) for ms, tokens in [(costs.plain_ms, 1), *cycles])

    texts = [script.Text([5], [number_below(3) for _ in range(9)], [tree() for _ in range(8)]) for _ in range(5)]
    rows = dict(script.rows_of(texts, costs, None, 3))
    assert rows["knowing what will be accepted"].ms == pytest.approx(sum(map(best_ms, texts)))
    assert rows["plain decoding"].ms == pytest.approx(40)
    fixed = {size: script.play(texts, costs, lambda size=size: script.Way(size)) for size in (1, 2, 3)}
    best = max(fixed, key=lambda size: fixed[size].speed)
    assert rows[f"the best fixed size, {best}"] == fixed[best]
    assert {one.num_tokens for one in rows.values()} == {40}
    assert min(rows.values(), key=lambda one: one.ms) == rows["knowing what will be accepted"]
    assert rows["the best fixed size of each text"].ms <= fixed[best].ms
    # Where no draft is ever right, drafting is tried now and then.
    wrong = [script.Text([5], [9] * 9, text.trees) for text in texts]
    assert (
        40 < script.play(wrong, costs, lambda: script.SizesThatFit(costs, None, 3)).ms < 40 * float(costs.cycle_ms(0))
    )
    # The context draws level where the text goes round in circles.
    rows = dict(script.rows_of(wrong, costs, None, 3, script.Lookup(3)))
    assert rows["the context alone"].ms < 0.8 * rows["plain decoding"].ms


class Reasons(GenerationObserver):
    """Keeps why each tree had its size."""

    def __init__(self) -> None:
        self.reasons: list[SizeReason] = []

    def on_tree_sized(self, reason: SizeReason) -> None:
        self.reasons.append(reason)


@pytest.mark.parametrize("lookup", [0, 5])
@pytest.mark.parametrize("has_costs", [False, True])
def test_what_is_played_is_what_decoding_does(lookup: int, has_costs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("bound_sizes", monkeypatch)
    pair = ROOT / "examples" / "demo_pair"
    target, tokenizer, drafter = script.load_pair(str(pair / "target"), str(pair / "gumiho"), "float32")
    prompt = tokenizer("def read(self):").input_ids
    text = script.read_text(script.BoundArguments("", max_size=8, max_new_tokens=60), target, drafter, prompt)
    table = make_cost_table(dtype="float32", draft_ms=12.0) if has_costs else None
    settings = {"num_assistant_tokens": 8, "cycle_costs": table, "prompt_lookup_num_tokens": lookup}
    with script.decoding_settings(drafter, settings), observing(seen := Reasons()):
        output = target.generate(
            torch.tensor([prompt]), assistant_model=drafter, max_new_tokens=60, return_dict_in_generate=True
        )
    assert output.sequences[0].tolist() == prompt + text.tokens
    costs = script.CycleCostTable.parse(table or make_cost_table()).for_batch(1)
    way, lengths = script.SizesThatFit(costs, None, 8) if has_costs else script.Way(8), []
    observe = way.observe
    monkeypatch.setattr(way, "observe", lambda tokens, right: (lengths.append(tokens), observe(tokens, right)))
    played = script.play([text], costs, lambda: way, script.Lookup(lookup) if lookup else None)
    # After the last cycle there is nothing to be told.
    expected = output.accepted_lengths[0]
    assert lengths == expected[:-1]
    assert played.num_tokens == sum(expected)
    sizes = zip(output.tree_sizes, seen.reasons or [None] * len(expected), strict=True)
    # Without costs, what is more than a tree is a run of what the context drafts.
    drafted = [isinstance(why, SizeChoice) or (why is None and size <= 8) for size, why in sizes]
    ms = [
        costs.cycle_ms(size) if is_drafted else costs.undrafted_ms(size)
        for size, is_drafted in zip(output.tree_sizes, drafted, strict=True)
    ]
    assert played.ms == pytest.approx(sum(map(float, ms)))
    assert max(lengths) > 2
    assert any(isinstance(why, ContextRun) for why in seen.reasons) == (has_costs and lookup > 0)


@pytest.mark.parametrize("lookup", [0, 5])
@pytest.mark.parametrize("draft_ms", [4.0, 12.0])
def test_batches_that_are_played_are_those_of_decoding(
    lookup: int, draft_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = load("bound_sizes", monkeypatch)
    script = load("play_batches", monkeypatch)
    pair = ROOT / "examples" / "demo_pair"
    target, tokenizer, drafter = bound.load_pair(str(pair / "target"), str(pair / "gumiho"), "float32")
    prompts = [tokenizer(text).input_ids for text in ("def read(self):", "import", "for line in")]
    args = bound.BoundArguments("", max_size=12, max_new_tokens=60)
    texts = [bound.read_text(args, target, drafter, prompt) for prompt in prompts]
    width = max(map(len, prompts))
    rows = {
        "input_ids": torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }
    table = make_cost_table(dtype="float32", draft_ms=draft_ms)
    settings = {"num_assistant_tokens": 12, "prompt_lookup_num_tokens": lookup}
    costs, looked_up = bound.CycleCostTable.parse(table).for_batch(3), bound.Lookup(lookup) if lookup else None
    sizes = []
    for cycle_costs in (table, None):
        with bound.decoding_settings(drafter, settings | {"cycle_costs": cycle_costs}):
            output = target.generate(
                **rows, assistant_model=drafter, max_new_tokens=60, do_sample=False, return_dict_in_generate=True
            )
        assert [row.tolist()[width:] for row in output.sequences] == [text.tokens for text in texts]
        sizes.append(output.tree_sizes)
    fitting, fixed = sizes
    played = list(script.play_fitting(texts, costs, script.TreeSizing(costs), looked_up))
    assert [size for size, _ in played] == fitting
    assert script.play_fixed(texts, costs, 12, looked_up) == pytest.approx(len(fixed) * float(costs.cycle_ms(12)))
    by_the_mean = list(script.play_fitting(texts, costs, script.TreeSizing(costs), looked_up, script.equal_weights))
    assert played != by_the_mean
    # Where no draft is right a cycle makes one token, whatever it verifies.
    wrong = script.always_wrong(texts[0])
    assert script.play_fixed([wrong], costs, 5, None) == pytest.approx(len(wrong.trees) * float(costs.cycle_ms(5)))
    ended = script.ended_at_random(texts[0], script.random.Random(0), 2)
    assert 2 <= len(ended.tokens) == len(ended.trees) + 1 < 60
    assert texts[0].tokens[: len(ended.tokens)] == ended.tokens
    with pytest.raises(SystemExit, match=r"Batches of 4 need as many texts, got 3: raise --num_prompts"):
        script.put_into_batches(texts, 4, script.BatchArguments(""))
    # A batch of one is what bound_sizes.py plays, but for runs.
    alone = bound.SizesThatFit(costs_of_one := bound.CycleCostTable.parse(table).for_batch(1), None, 12)
    alone.has_runs = False
    for text in texts:
        alone.sizing = script.TreeSizing(costs_of_one)
        played = script.play_fitting([text], costs_of_one, script.TreeSizing(costs_of_one), looked_up)
        assert sum(ms for _, ms in played) == pytest.approx(
            bound.play([text], costs_of_one, lambda: alone, looked_up).ms
        )


def test_parts_of_a_drafter_are_told_in_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    script = load("measure_parts", monkeypatch)
    options = ["--dtypes", "float32", "--num_prompts", "1", "--max_new_tokens", "16", "--tree_depths", "2", "7"]
    monkeypatch.setattr(sys, "argv", ["measure_parts.py", *options])
    script.main()
    rows = re.findall(r"^\| float32 \| (\d) \|(.*)\|$", capsys.readouterr().out, flags=re.M)
    assert [int(depth) for depth, _ in rows] == [2, 7]
    for depth, row in rows:
        fc, serial, heads, output, rest, drafting, step, share = map(float, row.replace("%", "").split("|"))
        assert min(fc, serial, output, step) > 0
        assert (heads > 0) == (depth == "7"), "the parallel heads draft from the third token on"
        assert fc + serial + heads + output + rest == pytest.approx(drafting, abs=0.04)
        assert share == pytest.approx(100 * drafting / step, abs=2)
    assert script.GumihoDrafter.score.__name__ == "score", "afterwards nothing is timed"


def test_an_embedding_that_is_shared_takes_no_memory() -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "measure_embedding_memory.py")]
    options = ["--vocab_size", "262144", "--hidden_size", "512"]
    output = subprocess.run([*script, *options], check=True, capture_output=True, text=True).stdout
    own, shared = map(float, re.search(r"of its own: ([-\d.]+) GB; with the target's: ([-\d.]+) GB", output).groups())
    assert own - shared == pytest.approx(0.25, abs=0.05)


def test_looking_up_is_timed_apart_from_merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """And reading the context is in neither."""
    script = load("measure_lookup", monkeypatch)
    args = script.LookupArguments(num_cycles=12)
    drafts, read = script.ContextDrafts.draft, []

    def noting(self: Any, *given: Any) -> Any:
        branch = drafts(self, *given)
        read.append(branch)
        time.sleep(0.01 if len(read) > 1 else 1.0)
        return branch

    monkeypatch.setattr(script.ContextDrafts, "draft", noting)
    lookup, merge, share = script.measure(300, 2, args)
    assert 10 <= lookup < 200
    assert merge < 200
    assert len(read) == 13
    assert share == sum(branch is not None for branch in read[1:]) / 12
    assert share > 0
