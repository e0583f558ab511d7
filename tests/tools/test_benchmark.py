"""The benchmark: what it reads, that it compares fairly, and that its numbers are what they are called."""

import json
import shutil
import statistics
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from commands import gumiho, refuse
from training_data import DEMO_TARGET, make_tokenizer, write_jsonl
from transformers import AutoModelForCausalLM, PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.tools.benchmarking import (
    BenchmarkArguments,
    DecodingMode,
    Question,
    Sample,
    benchmark,
    decoding_modes,
    read_prompts,
    run_benchmark,
    summarize,
)
from transformers_gumiho.tools.benchmarking.summary import bootstrap_interval, markdown
from transformers_gumiho.tools.measuring import prompts, timing
from transformers_gumiho.tools.measuring.timing import temporary_settings


DEMO_PAIR = DEMO_TARGET.parent
QUESTIONS = [
    Question("0", "code", ("def __init__(self, name):\n", "    def close(self")),
    Question("1", "code", ("import os\nimport ",)),
    Question("2", "text", ('"""Return the ',)),
]


MODES = [
    "prompt lookup", "assisted generation", "gumiho", "gumiho with prompt lookup", "gumiho without FTA", "chain of 3",
    "serial head only", "one serial token", "tree of 4",
]  # fmt: skip


@pytest.fixture(scope="module")
def samples(target: PreTrainedModel, drafter: GumihoModel) -> list[Sample]:
    """Every mode, greedily, sampled without the conversation of two turns, and greedily in pairs."""
    draft_model = AutoModelForCausalLM.from_pretrained(DEMO_PAIR / "draft_model", dtype=torch.float32)
    modes = decoding_modes(drafter, MODES, draft_model)
    measured = [target, make_tokenizer(None), QUESTIONS, modes]
    sampled = run_benchmark(target, make_tokenizer(None), QUESTIONS[1:], modes, temperatures=(1.0,), max_new_tokens=8)
    runs = ({}, {"batch_sizes": [2]})
    return [*sampled, *(sample for run in runs for sample in run_benchmark(*measured, **run, max_new_tokens=8))]


def test_every_mode_decodes_every_prompt_to_plain_decodings_text(samples: list[Sample], drafter: GumihoModel) -> None:
    modes = ["plain", *MODES]
    alone = [sample for sample in samples if sample.batch_size == 1]
    # Three first turns and a second one, and two sampled ones.
    batches = dict.fromkeys((tuple(s.questions), s.turn, s.temperature) for s in alone)
    assert len(batches) == 6
    for batch in batches:
        assert [s.mode for s in alone if (tuple(s.questions), s.turn, s.temperature) == batch] == modes
    # transformers' own assisted decoding draws other random numbers.
    exact = [s for s in samples if s.temperature == 0 or s.mode not in ("prompt lookup", "assisted generation")]
    assert all(sample.equal for sample in exact)
    pairs = [sample for sample in samples if sample.batch_size == 2]
    assert {sample.mode for sample in pairs} == set(modes) - {"prompt lookup", "assisted generation"}
    for sample in samples:
        assert 0 < sample.num_tokens <= 8 * len(sample.questions)
        assert (sample.accepted_lengths is not None) == (sample.stages is not None)
    depths = {"chain of 3": 4, "serial head only": 3, "one serial token": 2}
    for mode, longest in depths.items():
        lengths = [n for s in samples if s.mode == mode for row in s.accepted_lengths for n in row]
        assert max(lengths) <= longest
    assert drafter.generation_config.branching_factor == 2  # as it was before


def test_a_drafter_that_looks_up_by_itself_is_measured_without_it_too(drafter: GumihoModel) -> None:
    four = ["plain", "prompt lookup", "gumiho", "gumiho with prompt lookup"]
    assert [mode.name for mode in decoding_modes(drafter)] == four
    with pytest.raises(ValueError, match="'assisted generation' and --draft_model belong together"):
        decoding_modes(drafter, ["assisted generation"])
    with temporary_settings(drafter, {"prompt_lookup_num_tokens": 7}):
        modes = {mode.name: mode for mode in decoding_modes(drafter)}
        assert "gumiho with prompt lookup" not in modes
        assert modes["gumiho without prompt lookup"].settings == {"prompt_lookup_num_tokens": None}
        assert modes["gumiho"].settings == {}


def test_speeds_are_those_of_the_clock(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode that is made slower by a known time is measured to be so."""
    clock = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def taking(seconds: float) -> dict[str, list]:
        def wait(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            clock[0] += seconds  # 8 times in a text
            return scores

        return {"logits_processor": [wait]}

    modes = [DecodingMode("plain", taking(0.01)), DecodingMode("slow", taking(0.035))]
    samples = list(run_benchmark(target, make_tokenizer(None), QUESTIONS[1:], modes, max_new_tokens=8))
    plain, slow = ([s.seconds for s in samples if s.mode == mode] for mode in ("plain", "slow"))
    assert statistics.median(slow) - statistics.median(plain) == pytest.approx(0.2)
    row = next(row for row in summarize(samples) if row.mode == "slow" and row.category == "overall")
    assert row.speedup < 1
    assert "**slower than plain**" in markdown([row])
    as_fast = replace(row, speedup=0.996)
    assert "| 1.00 |" in markdown([as_fast])
    assert "slower" not in markdown([as_fast])  # what stands there says nothing else


def make_sample(mode: str, question: int, seconds: float, category: str = "a", **overrides: object) -> Sample:
    fields = {
        "mode": mode, "temperature": 0.0, "batch_size": 1, "category": category, "questions": [str(question)],
        "turn": 0, "seconds": seconds, "num_tokens": 100, "equal": True,
        "accepted_lengths": None, "stages": None,
    }  # fmt: skip
    return Sample(**fields | overrides)


def test_summary_compares_prompt_by_prompt() -> None:
    plain = [make_sample("plain", i, seconds) for i, seconds in enumerate((1.0, 2.0, 4.0))]
    stages = {"prompt": 9.0, "verify": 6.0, "draft": 3.0, "rest": 1.0, "num_cycles": 5}
    cycles = {"accepted_lengths": [[3, 1, 2]], "draft_origins": ["drafter"] * 3}
    drafted = [
        make_sample("gumiho", i, seconds, **cycles, stages=stages, equal=i > 0)
        for i, seconds in enumerate((0.5, 0.5, 4.0))
    ]
    rows = {row.mode: row for row in summarize([*plain, *drafted])}
    row = rows["gumiho"]
    assert row.speedup == 2.0  # the median of 2, 4 and 1
    assert row.interval == (1.0, 4.0)
    assert row.tokens_per_second == (112.5, 200.0, 200.0)
    assert (row.num_samples, row.num_equal) == (3, 2)
    assert row.tau_micro == row.tau_macro == 2.0
    assert row.acceptance_per_position == pytest.approx([2 / 3, 1 / 3])
    assert row.shares == pytest.approx({"verify": 0.6, "draft": 0.3, "rest": 0.1})
    assert rows["plain"].speedup == 1
    table = markdown(list(rows.values()))
    assert "| gumiho | 200.0 | 2.00 | 2.00 (2.00) | 2.00 | 30% / 60% / 10% | 2 of 3 |" in table
    # Of fewer than six batches, no range holds the median with 95%.
    row = replace(rows["gumiho"], num_samples=6)
    assert "| gumiho | 200.0 (112.5-200.0) | 2.00 (1.00-4.00) | 2.00 (2.00) |" in markdown([row])


def test_tau_is_that_of_drafted_cycles_and_pauses_stand_beside_it() -> None:
    """A drafter that pauses looks no weaker than it is."""
    origins = ["drafter", "pause", "pause", "drafter", "end"]
    cycles = {"accepted_lengths": [[2, 1, 1, 3, 1], [1]], "draft_origins": origins, "break_even": 2.6}
    samples = [make_sample("plain", 0, 1.0, batch_size=2), make_sample("gumiho", 0, 1.0, batch_size=2, **cycles)]
    row = next(row for row in summarize(samples) if row.mode == "gumiho")
    assert row.tau_micro == pytest.approx((2 + 3 + 1) / 3)
    assert row.tokens_per_pass == pytest.approx(9 / 6)
    assert row.paused_share == pytest.approx(2 / 6)
    report = markdown([row])
    assert "| 2.00 (1.75) | 1.50 (33%) |" in report
    assert "paused in 33% of the passes, because a drafted pass costs 2.6 steps of plain decoding here" in report
    assert "- **tau**: tokens that a pass of the target commits if the drafter drafted." in report


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_machine_that_is_busy_is_noticed(
    is_idle: bool, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding's own repeats take different times then."""
    generate, calls, clock = target.generate, [], [0.0]

    def generate_busily(**kwargs: object) -> object:
        calls.append(kwargs)
        clock[0] += 0.2 if is_idle or len(calls) % 2 else 0.4
        return generate(**kwargs)

    monkeypatch.setattr(target, "generate", generate_busily)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    modes = [DecodingMode("plain")]
    samples = list(run_benchmark(target, make_tokenizer(None), QUESTIONS[1:], modes, max_new_tokens=2))
    # In each category a warm-up, then twice for the first prompt and once for the second.
    assert len(calls) == 4
    assert [sample.repeat_seconds is not None for sample in samples] == [True, False]
    row = summarize(samples)[0]
    assert row.repeat_spread == pytest.approx(1.0 if is_idle else 2.0)
    busy = [replace(sample, seconds=1.0, repeat_seconds=1.0 if is_idle else 1.5) for sample in samples]
    assert ("**The machine was not idle:**" in markdown(summarize(busy))) == (not is_idle)


def test_summary_keeps_categories_apart_and_together() -> None:
    samples = [
        make_sample(mode, index, seconds, category)
        for category, index, times in (("a", 0, (1.0, 0.5)), ("b", 1, (1.0, 0.25)))
        for mode, seconds in zip(("plain", "gumiho"), times, strict=True)
    ]
    found = {(row.category, row.mode): row.speedup for row in summarize(samples)}
    assert found[("a", "gumiho")] == 2
    assert found[("b", "gumiho")] == 4
    assert found[("overall", "gumiho")] == 3


def test_bootstrap_interval_holds_the_median_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        lower, upper = bootstrap_interval(generator.exponential(size=40), seed=seed)
        hits += lower <= np.log(2) <= upper
    assert 0.88 < hits / 200 < 0.99


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (b'{"prompt": ', r"Row 3 of '.*q.jsonl' is not JSON, or not UTF-8\. Give a JSON object"),
        (b'["def f"]', r"Row 3 of '.*q.jsonl' is not a JSON object"),
        ('{"prompt": "d\xe9f"}'.encode("latin-1"), r"q.jsonl' is not UTF-8 in line 3: .* Save it as UTF-8"),
    ],
)
def test_files_from_elsewhere_are_read_or_named(tmp_path: Path, second: bytes, message: str) -> None:
    path, good = tmp_path / "q.jsonl", b'{"prompt": "def f"}'
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\r\n\r\n" + good)
    assert [question.turns for question in read_prompts(str(path))] == [("def f",)] * 2
    path.write_bytes(b"\n".join([good, b"", second, good]))
    with pytest.raises(ValueError, match=message):
        read_prompts(str(path))


def test_questions_are_read_in_all_their_forms(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Compose.", "Shorten."]},
        {"prompt": "Say it."},
        '{"text": "It goes\u2028on"}',  # a character at which `str.splitlines` splits, too
    ]
    name = write_jsonl(tmp_path / "questions.jsonl", rows)
    assert read_prompts(name) == [
        Question("81", "writing", ("Compose.", "Shorten.")),
        Question("1", "all", ("Say it.",)),
        Question("2", "all", ("It goes\u2028on",)),
    ]
    assert len(read_prompts(name, num_prompts=2)) == 2
    with pytest.raises(ValueError, match=r"Row 1 .* the columns \['body'\], and needs 'turns' or 'prompt' or 'text'"):
        read_prompts(write_jsonl(tmp_path / "other.jsonl", [{"body": "x"}]))
    with pytest.raises(ValueError, match="has turns that are not text"):
        read_prompts(write_jsonl(tmp_path / "bad.jsonl", [{"turns": [1]}]))
    with pytest.raises(ValueError, match="holds no questions"):
        read_prompts(write_jsonl(tmp_path / "none.jsonl", [""]))
    with pytest.raises(FileNotFoundError, match=r"There is no file .*missing\.jsonl"):
        read_prompts(str(tmp_path / "missing.jsonl"))


@pytest.mark.parametrize("name", ["qualitative/test-00000-of-00001.parquet", "qualitative", ":qualitative"])
def test_speed_bench_is_read_as_it_is_published(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of it, a folder, and a config of the dataset. Texts that it may not pass on are placeholders in it."""
    placeholder = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    texts = {"c1": ["Write.", "Shorten."], "m1": [placeholder], "c2": ["Sort."], "m2": ["Add."]}
    rows = [
        {"question_id": name, "category": {"c": "coding", "m": "math"}[name[0]], "turns": turns, "sub_category": None}
        for name, turns in texts.items()
    ]
    for config, chosen in (("qualitative", rows), ("throughput_1k", rows[:1])):
        (tmp_path / config).mkdir()
        datasets.Dataset.from_list(chosen).to_parquet(tmp_path / config / "test-00000-of-00001.parquet")
    configs = [
        {"config_name": config, "data_files": [{"split": "test", "path": f"{config}/test-*"}]}
        for config in ("qualitative", "throughput_1k")
    ]
    (tmp_path / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    warnings: list[str] = []
    monkeypatch.setattr(prompts.logger, "warning", warnings.append)
    path = f"{tmp_path}{name}" if name.startswith(":") else str(tmp_path / name)
    expected = [
        Question("c1", "coding", ("Write.", "Shorten.")), Question("c2", "coding", ("Sort.",)),
        Question("m2", "math", ("Add.",)),
    ]  # fmt: skip
    assert read_prompts(path) == expected
    assert read_prompts(path, num_prompts=2) == expected[:2]
    assert read_prompts(path, per_category=1) == [expected[0], expected[2]]
    assert f"Left out 1 rows of {path!r}, which hold a placeholder" in warnings[0]


def samples_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "samples.jsonl").read_text().splitlines()
    return [sample for line in lines for sample in json.loads(line)["samples"]]


def test_command_writes_everything_it_measured(tmp_path: Path) -> None:
    """The chosen modes decode the first prompts of each category."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    words = [
        "benchmark", "--target", DEMO_TARGET, "--assistant", DEMO_PAIR / "gumiho", "--prompts",
        DEMO_PAIR / "prompts.jsonl", "--prompts_per_category", 1, "--max_new_tokens", 4, "--dtype", "float32",
        "--output_dir", tmp_path / "out", "--chat_template", template, "--modes",
    ]  # fmt: skip
    written = gumiho(*words, "gumiho", "chain of 5")
    assert "| overall, greedy, batch size 1 (4 batches) | plain |" in written
    assert written.count("| prompts | mode |") == 1
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"samples.jsonl", "samples.jsonl.made_from.json", "summary.json", "summary.md"}
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    overall = {row["mode"]: row["num_equal"] for row in summary["rows"] if row["category"] == "overall"}
    assert overall == {"plain": 4, "gumiho": 4, "chain of 5": 4}
    assert summary["environment"]["torch"] == torch.__version__
    first: dict[str, str] = {}
    for number, line in enumerate((DEMO_PAIR / "prompts.jsonl").read_text().splitlines()):
        first.setdefault(json.loads(line)["category"], str(number))
    samples = samples_of(tmp_path / "out")
    asked = {sample["category"]: sample["questions"] for sample in samples}
    assert asked == {category: [name] for category, name in first.items()}
    refuse("There is no mode 'chain of 9'. Choose from 'plain', ", *words, "chain of 9", "--restart", "--yes")
    assert samples_of(tmp_path / "out") == samples, "an error deletes nothing"


def test_an_interrupted_benchmark_keeps_what_it_has_and_goes_on(
    target: PreTrainedModel, drafter: GumihoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, calls = target.generate, []

    def interrupted(**kwargs: object) -> object:
        calls.append(kwargs)
        if len(calls) > limit:
            raise KeyboardInterrupt
        return generate(**kwargs)

    monkeypatch.setattr(target, "generate", interrupted)
    modes = [DecodingMode("plain"), DecodingMode("gumiho", {"assistant_model": drafter})]
    path = tmp_path / "samples.jsonl"

    def run() -> list[Sample]:
        calls.clear()
        samples: list[Sample] = []
        with suppress(KeyboardInterrupt):
            for sample in run_benchmark(
                target, make_tokenizer(None), QUESTIONS, modes, max_new_tokens=4, journal=path
            ):
                samples.append(sample)
        return samples

    limit = 6  # two for warm-up, three for the first turn of the first prompt, one for the second
    assert [sample.mode for sample in run()] == ["plain", "gumiho"]
    assert not path.exists(), "the second turn needs the answer to the first"
    limit = 9
    assert [(s.questions, s.turn) for s in run()[::2]] == [(["0"], 0), (["0"], 1), (["1"], 0)]
    with path.open("a") as file:
        file.write('{"of": "1", "samples": [{"mode": "pla')  # killed while it wrote
    limit = 0
    assert len(run()) == 6  # stopped as it begins to warm up, it has what it had
    limit = 8
    samples = run()
    assert len(calls) == 4  # two for warm-up, two for the last prompt
    assert [(s.questions, s.turn, s.mode) for s in samples] == [
        (questions, turn, mode)
        for questions, turn in [(["0"], 0), (["0"], 1), (["1"], 0), (["2"], 0)]
        for mode in ("plain", "gumiho")
    ]
    assert len(samples_of(tmp_path)) == len(samples)
    limit = 0
    assert run() == samples
    assert not calls


def test_samples_of_another_drafter_or_prompt_are_not_gone_on_with(tmp_path: Path) -> None:
    shutil.copytree(DEMO_PAIR / "gumiho", tmp_path / "gumiho")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "import os"}\n')
    args = BenchmarkArguments(
        target=str(DEMO_TARGET), assistant=str(tmp_path / "gumiho"), prompts=str(prompts), dtype="float32",
        modes=["gumiho"], max_new_tokens=4, output_dir=str(tmp_path / "out"),
    )  # fmt: skip
    assert [row.num_samples for row in benchmark(args)] == [1, 1]
    prompts.write_text('{"text": "import re"}\n{"text": "import os"}\n')  # the same text under another name
    assert [row.num_samples for row in benchmark(args)] == [2, 2]
    written = samples_of(tmp_path / "out")
    assert len(written) == 6
    config = json.loads((tmp_path / "gumiho" / "generation_config.json").read_text())
    (tmp_path / "gumiho" / "generation_config.json").write_text(json.dumps(config | {"num_assistant_tokens": 5}))
    with pytest.raises(ValueError, match=r"created with different settings: settings of the assistant.*--restart"):
        benchmark(args)
    with pytest.raises(ValueError, match=r"--restart deletes .*samples.jsonl .*Give --yes to delete"):
        benchmark(replace(args, restart=True))
    assert samples_of(tmp_path / "out") == written
    benchmark(replace(args, restart=True, yes=True))
    assert len(samples_of(tmp_path / "out")) == 4
