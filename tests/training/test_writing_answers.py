"""A dataset in which the target answers itself."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from chat_target import make_chat_target, make_chat_tokenizer
from datasets import Dataset
from targets import make_target
from training_data import CHATML, DEMO_TARGET, FORGETFUL, MARKED, MESSAGES, OPENING, make_tokenizer, read_jsonl
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, TopKLogitsWarper, TopPLogitsWarper

from transformers_gumiho.internals import CACHE_NAME
from transformers_gumiho.training import (
    LocalEngine,
    Sampling,
    WritingSettings,
    load_conversations,
    prepare_dataset,
    regenerate_dataset,
)
from transformers_gumiho.training.writing import local
from transformers_gumiho.training.writing.answers import loops
from transformers_gumiho.training.writing.requests import Request


GREEDY = Sampling(share=0.0)
ALL_SAMPLED = Sampling(top_p=1.0, share=1.0)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32).eval()


def regenerate(
    rows: list[dict[str, Any]], target: PreTrainedModel, path: Path, template: str | None = CHATML, **settings: Any
) -> list[dict[str, Any]]:
    batch_size, tokenizer = settings.pop("batch_size", 2), settings.pop("tokenizer", make_tokenizer(template))
    kwargs = settings.pop("chat_template_kwargs", None)
    written = WritingSettings(**{"max_length": 64, "sampling": GREEDY} | settings)
    engine, columns = LocalEngine(target, batch_size), {name: None for row in rows for name in row}
    dataset = Dataset.from_list([columns | row for row in rows])
    regenerate_dataset(dataset, engine, tokenizer, path, written, chat_template_kwargs=kwargs)
    return read_jsonl(path)


def answer(target: PreTrainedModel, prompt: str, num_tokens: int) -> str:
    """What the target says to a prompt by itself."""
    ids = make_tokenizer()(prompt, return_tensors="pt")["input_ids"]
    output = target.generate(ids, do_sample=False, max_new_tokens=num_tokens)
    return make_tokenizer().decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_each_answer_is_the_targets_after_its_own_earlier_ones(target: PreTrainedModel, tmp_path: Path) -> None:
    sources = [MESSAGES[1:3], MESSAGES, MESSAGES[:2]]  # the last one is a question
    rows = [{"messages": sources[0]}, {"messages": sources[1]}, {"prompt": sources[2]}]
    found = regenerate(rows, target, tmp_path / "out.jsonl", max_new_tokens=8, max_length=200)
    tokenizer = make_tokenizer()
    for number, (row, source) in enumerate(zip(found, sources, strict=True)):
        messages, turns = row["messages"], iter(row["generations"])
        assert row["row"] == number
        assert [m["role"] for m in messages[: len(source)]] == [m["role"] for m in source]
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                assert message == source[index]
                continue
            prompt = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
            assert message["content"] == answer(target, prompt, 8)
            turn = next(turns)
            assert tokenizer.decode(turn["prompt_ids"]) == prompt
            assert tokenizer.decode(turn["answer_ids"]) == message["content"]


def test_texts_are_continued(target: PreTrainedModel, tmp_path: Path) -> None:
    text = "def __init__(self, name):\n        self.name = name\n"
    rows = [{"prompt": "class A:", "completion": "x"}, {"text": text, "prompt": None}, {"prompt": "class"}]
    rows = regenerate(rows, target, tmp_path / "out.jsonl", None, num_prompt_tokens=6, max_new_tokens=10)
    tokenizer = make_tokenizer()
    prompt = tokenizer.decode(tokenizer(text)["input_ids"][:6])
    assert (rows[0]["prompt"], rows[0]["completion"]) == ("class A:", answer(target, "class A:", 10))
    assert rows[1]["text"] == prompt + answer(target, prompt, 10)
    assert rows[2]["completion"] == answer(target, "class", 10)
    assert {row["ended"] for row in rows} == {False}


@pytest.mark.parametrize("template", [CHATML, MARKED, FORGETFUL, OPENING, None])
def test_training_reads_the_tokens_that_the_target_wrote(tmp_path: Path, template: str | None) -> None:
    """Special ones, too, and those of texts that encode to other tokens, and no end where an answer was cut."""
    target, tokenizer = make_chat_target(), make_chat_tokenizer(template)
    rows: list[dict[str, Any]] = [{"messages": MESSAGES[index % 2 :]} for index in range(6)]
    if template is None:
        rows = [{"prompt": f"import {name}", "completion": "x"} for name in ("os", "re", "sys", "abc")]
        rows.append({"text": "名前" * 20})  # whose prompt ends within a character
    lines = regenerate(
        rows, target, tmp_path / "a.jsonl", tokenizer=tokenizer, max_new_tokens=12, max_length=400,
        sampling=ALL_SAMPLED, batch_size=3,
    )  # fmt: skip
    wrote = [(turn["prompt_ids"], turn["answer_ids"]) for line in lines for turn in line.get("generations", [])]
    dataset = load_conversations(str(tmp_path / "a.jsonl"))
    prepared, _ = prepare_dataset(dataset, tokenizer, target.config, max_length=400, packing=False)
    learned = [pair for row in prepared for pair in answers_of(row["input_ids"], row["loss_mask"])]
    # The state of an answer of one token is not followed by one that could be learned.
    assert sorted(learned) == sorted(pair for pair in wrote if len(pair[1]) > 1)
    assert {new[-1] == tokenizer.eos_token_id for _, new in wrote} == {True, False}


def answers_of(ids: list[int], mask: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields for each run of states that count what was read before, and the tokens."""
    edges = [index for index in range(1, len(ids)) if mask[index] != mask[index - 1]]
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        yield ids[:first], ids[first : last + 1]


def test_the_row_gives_its_template_tools_and_arguments(target: PreTrainedModel, tmp_path: Path) -> None:
    """Those of the row come before those of the command, and the history may lack marks that a template refuses."""
    template = (
        "\n{% if tools %}tools {{ tools | tojson }}\n{% endif %}{% if quick %}quick\n{% endif %}"
        "{% for m in messages %}"
        "{% if m.role == 'assistant' and '<|endoftext|>' in m.content %}{{ raise_exception('a mark') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "list_paths"}}]
    rows = [{"prompt": "os?", "tools": json.dumps(tools)}, {"prompt": "re?", "chat_template_kwargs": {"quick": False}}]
    settings: dict[str, Any] = {"max_new_tokens": 4, "max_length": 100, "chat_template_kwargs": {"quick": True}}
    found = regenerate(rows, target, tmp_path / "a.jsonl", template, **settings)
    read_by_it = [make_tokenizer().decode(row["generations"][0]["prompt_ids"]) for row in found]
    assert read_by_it == [f"\ntools {json.dumps(tools)}\nquick\nuser: os?\n", "\nuser: re?\n"]
    assert found[0]["tools"] == tools
    assert found[1]["chat_template_kwargs"] == {"quick": False}
    marked = make_chat_target()
    marked.lm_head.weight.data[:] = 0  # it says the first token, a mark, again and again
    (row,) = regenerate(
        [{"messages": MESSAGES[1:]}], marked, tmp_path / "b.jsonl", template, max_new_tokens=3, max_length=100
    )
    assert [turn["answer_ids"] for turn in row["generations"]] == [[0, 0, 0]] * 2


# In float64, eager attention makes NaN of padding's scores.
@pytest.mark.parametrize("family", ["llama", "phi3_sliding", "qwen2_mixed", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("sampling", [None, Sampling(1.3, 0.9), Sampling(0.9, 1.0, 7)])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_nothing_beside_a_row_changes_it(
    family: str, sampling: Sampling | None, penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its tokens, greedy or sampled, and not its limit, also when other rows have left the batch."""
    monkeypatch.setattr(local, "_NUM_TOKENS", 3)
    engine = LocalEngine(make_target(family))
    engine.target.generation_config.repetition_penalty = penalty
    engine.ends = frozenset({6})
    prompts, limits = [[3, 1, 4, 1, 5], [3, 1, 4, 2], [3] * 9, [1]], [20, 4, 20, 17]
    requests = [Request(p, n, sampling, seed) for seed, (p, n) in enumerate(zip(prompts, limits, strict=True))]
    requests[3] = Request([1], 17, None, 0)  # a greedy row among sampled ones
    together = engine.complete(requests)
    assert together == [engine.complete([request])[0] for request in requests]
    for (new, ended), limit in zip(together, limits, strict=True):
        assert len(new) == limit or ended
        assert ended == (new[-1] == 6)
        assert 6 not in new[:-1]
    plain = engine.target.generate(torch.tensor([[1]]), do_sample=False, max_new_tokens=17, eos_token_id=6)
    assert together[3][0] == plain[0, 1:].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2_mixed"])
def test_rows_that_end_make_room_for_others(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each piece, within the batch and the tokens of a pass. Windowed layers let all rows of a batch end first."""
    engine, calls = LocalEngine(make_target(family), batch_size=3, tokens_per_pass=8), list[tuple[int, int, bool]]()
    monkeypatch.setattr(local, "_NUM_TOKENS", 2)
    requests = [
        Request([1 + n % 5] * length, 2 + 3 * n % 8, None, 0) for n, length in enumerate((6, 5, 4, 2, 1, 3, 9))
    ]
    alone = [engine.complete([request])[0] for request in requests]
    generate = engine.target.generate

    def look(ids: torch.Tensor, **settings: Any) -> torch.Tensor:
        cache = settings.get(CACHE_NAME)
        calls.append((*ids.shape, cache is None or not cache.get_seq_length()))
        return generate(ids, **settings)

    monkeypatch.setattr(engine.target, "generate", look)
    assert engine.complete(requests) == alone
    assert max(num_rows for num_rows, *_ in calls) <= 3
    assert all(num_rows * width <= 8 or num_rows == 1 for num_rows, width, is_prompt in calls if is_prompt)
    if family == "llama":
        last_prompt = max(number for number, (*_, is_prompt) in enumerate(calls) if is_prompt)
        # A row that ends with its first token leaves its place empty for one piece.
        assert min(num_rows for num_rows, _, is_prompt in calls[:last_prompt] if not is_prompt) >= 2


def test_a_batch_that_is_too_large_for_the_memory_is_halved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows go on where they were; where not even one fits, the device's error stays."""
    engine, most = LocalEngine(make_target(), batch_size=4), 2
    monkeypatch.setattr(local, "_NUM_TOKENS", 3)
    requests = [Request([1 + n] * (n + 2), 8, Sampling(), n) for n in range(5)]
    alone, generate = [engine.complete([request])[0] for request in requests], engine.target.generate

    def fail(ids: torch.Tensor, **settings: Any) -> torch.Tensor:
        if len(ids) > most and ids.shape[1] > 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return generate(ids, **settings)

    monkeypatch.setattr(engine.target, "generate", fail)
    assert engine.complete(requests) == alone
    assert engine.batch_size == 2
    assert "memory is too small for 4 rows: now 2 at a time" in capsys.readouterr().out
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        engine.complete(requests)


@pytest.mark.parametrize(
    "sampling", [Sampling(1.5, 0.3), Sampling(1.0, 0.8), Sampling(2.0, 1.0), Sampling(1.0, 0.9, 5)]
)
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_drawn_tokens_have_the_distribution_of_transformers_own_sampling(sampling: Sampling, spread: float) -> None:
    """Also where the nucleus holds more tokens than are looked at first."""
    logits = spread * torch.randn(1, 900, generator=torch.Generator().manual_seed(0))
    expected = logits / sampling.temperature
    if sampling.top_k:
        expected = TopKLogitsWarper(sampling.top_k)(None, expected)
    expected = TopPLogitsWarper(sampling.top_p)(None, expected).softmax(-1)[0].double()
    number = 20_000
    numbers = (torch.arange(number) + 0.5) / number  # evenly spread, so that shares are probabilities but for rounding
    drawn = local.draw(logits.expand(number, -1), sampling, numbers)
    shares = drawn.bincount(minlength=900).double() / number
    assert (shares - expected).abs().max() < 2 / number + 1e-4


def test_a_share_is_sampled_as_the_target_samples(target: PreTrainedModel, tmp_path: Path) -> None:
    rows = [{"prompt": f"def f{index}(self):\n    return"} for index in range(60)]
    settings: dict[str, Any] = {"max_new_tokens": 6, "batch_size": 60}
    found = regenerate(rows, target, tmp_path / "a.jsonl", None, sampling=Sampling(1.0, 0.95, share=0.3), **settings)
    greedy = regenerate(rows, target, tmp_path / "b.jsonl", None, **settings)
    same = [row["completion"] == other["completion"] for row, other in zip(found, greedy, strict=True)]
    assert all(same[index] for index, row in enumerate(found) if not row["sampled"])
    assert not all(same)
    assert (
        60 * 0.3 - 2 * math.sqrt(60 * 0.21)
        < sum(row["sampled"] for row in found)
        < 60 * 0.3 + 2 * math.sqrt(60 * 0.21)
    )
    thinking = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95, top_k=20)
    assert Sampling.of_target(thinking) == Sampling(0.6, 0.95, 20, share=1.0)
    assert Sampling.of_target(GenerationConfig()) == Sampling(1.0, 0.95, 0, share=0.25)


@pytest.mark.parametrize(
    "config",
    [
        {"return_dict_in_generate": True, "output_scores": True}, {"num_beams": 3},
        {"num_return_sequences": 2, "do_sample": True}, {"do_sample": True, "temperature": 5.0, "top_k": 3},
        {"min_new_tokens": 2, "max_time": 1e-9}, {"use_cache": False}, {"cache_implementation": "static"},
        {"min_length": 60}, {"forced_eos_token_id": 5}, {"begin_suppress_tokens": [*range(500)]},
        {"exponential_decay_length_penalty": (1, 90.0)},
    ],
)  # fmt: skip
def test_the_targets_own_config_does_not_break_writing(
    config: dict[str, Any], target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "class A:"}, {"prompt": "import "}, {"prompt": "def f(self):"}]
    expected = regenerate(rows, target, tmp_path / "a.jsonl", None, max_new_tokens=6)
    monkeypatch.setattr(target, "generation_config", GenerationConfig(eos_token_id=0, **config))
    assert regenerate(rows, target, tmp_path / "b.jsonl", None, max_new_tokens=6) == expected


def test_an_offloaded_target_writes_what_it_writes_in_memory() -> None:
    """Its first parameters are on no device, and neither the tokens nor the randomness can be there."""
    requests = [Request(prompt, 10, Sampling(), 0) for prompt in ([1, 2, 3, 4], [1, 2, 5], [1, 3, 3, 3, 2])]
    found = [LocalEngine(place(make_target().float())).complete(requests) for place in (lambda t: t, cpu_offload)]
    assert found[0] == found[1]


def test_rows_that_are_of_no_use_say_why(
    target: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"role": "user", "content": "x = 1\n" * 100}
    rows = regenerate(
        [{"messages": None}, {"messages": [long]}, {"messages": [*MESSAGES[1:4], long]}, {"messages": MESSAGES[:2]}],
        target, tmp_path / "out.jsonl", max_length=100, max_new_tokens=5,
    )  # fmt: skip
    assert rows[0]["skipped"].startswith("has none of")
    assert "no room for an answer" in rows[1]["skipped"]
    assert [len(row["messages"]) for row in rows[2:]] == [2, 3]
    assert "no room" in rows[2]["left_out"]
    text = " ".join(capsys.readouterr().out.split())  # it is wrapped
    assert "4 rows with 2 answers. Left out: 2 (there is no room for an answer within the maximum length), 1 (" in text
    assert "100% of the answers were cut at a limit: raise `--max_new_tokens`" in text
    regenerate([{"messages": MESSAGES[:2]}], target, tmp_path / "short.jsonl", max_length=60, max_new_tokens=50)
    assert "were cut at a limit: raise `--max_length`" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(
        ValueError, match=r"No row could be answered: 1 rows with 0 answers. Left out: 1 \(there is no"
    ):
        regenerate([{"messages": [long]}], target, tmp_path / "none.jsonl")


def test_answers_that_end_in_a_loop_are_left_out(tmp_path: Path) -> None:
    assert loops([5, 6] + [1, 2, 3] * 50)
    assert not loops([1, 2, 3] * 40)
    assert not loops(list(range(200)))
    same = make_chat_target()
    same.lm_head.weight.data[:] = 0
    with pytest.raises(ValueError, match=r"Left out: 2 \(the answer ends in a loop\)"):
        regenerate([{"prompt": "a"}, {"prompt": "b"}], same, tmp_path / "a.jsonl", max_new_tokens=130, max_length=300)


def test_a_target_that_overflows_writes_nothing(tmp_path: Path) -> None:
    large = make_chat_target().half()
    large.model.norm.weight.data.fill_(6e4)
    with pytest.raises(
        ValueError, match=r"not finite \(torch.float16\). It overflows in float16: load it in bfloat16"
    ):
        regenerate([{"messages": MESSAGES}], large, tmp_path / "out.jsonl", max_length=100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampling(share=1.5), r"the share in \[0, 1\], got Sampling\(.*share=1.5,"),
        (lambda: LocalEngine(make_target(), 0), "`batch_size` must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("own", [{"min_p": 0.99}, {"typical_p": 1e-4}, {"epsilon_cutoff": 0.9}])
def test_all_that_a_target_says_of_sampling_is_followed(own: dict[str, float]) -> None:
    """Each of these leaves one token, which no number that is drawn changes."""
    config = GenerationConfig(do_sample=True, temperature=1.5, top_p=1.0, top_k=0, **own)
    sampling = Sampling.of_target(config)
    assert sampling.further == own
    scores = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).repeat(8, 1)
    drawn = local.draw(scores, sampling, torch.linspace(0, 0.99, 8))
    assert len({*drawn.tolist()}) == 1
    assert Sampling.of_target(GenerationConfig(do_sample=True, typical_p=1.0)).further == {}
