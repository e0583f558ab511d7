"""Training data without data: the target's own prompts and answers."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from chat_target import make_chat_target, make_chat_tokenizer
from targets import make_target
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from training_data import CHATML
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TopPLogitsWarper

from transformers_gumiho.training import (
    Sampling,
    SynthesisSettings,
    UserTurnNotFoundError,
    load_conversations,
    prepare_dataset,
    row_leaving,
    synthesize_dataset,
)
from transformers_gumiho.training.row_leaving import continue_rows
from transformers_gumiho.training.sampling import Nucleus
from transformers_gumiho.training.synthesis import synthesis, writing
from transformers_gumiho.training.synthesis.degenerate import why_degenerate
from transformers_gumiho.training.synthesis.near_duplicates import NearDuplicates
from transformers_gumiho.training.synthesis.user_turn import find_user_turn
from transformers_gumiho.training.synthesis.writing import write_user_turns


SETTINGS: dict[str, Any] = {
    "num_prompts": 7, "batch_size": 4, "max_prompt_tokens": 40, "max_new_tokens": 12, "sampled_share": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_chat_target()


def synthesize(target: PreTrainedModel, path: Path, **arguments: Any) -> list[dict[str, Any]]:
    names = {item.name for item in fields(SynthesisSettings)} & {*arguments}
    settings = SynthesisSettings(**SETTINGS | {name: arguments.pop(name) for name in names})
    template = arguments.pop("template", CHATML)
    synthesize_dataset(target, make_chat_tokenizer(template), path, settings, **arguments)
    return read(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def written(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, whole."""
    folder = tmp_path_factory.mktemp("whole")
    synthesize(target, folder / "a.jsonl")
    return folder


def test_every_kept_prompt_is_answered_once(target: PreTrainedModel, written: Path) -> None:
    rows, prompts = read(written / "a.jsonl"), read(written / "a.prompts.jsonl")
    own = [row["prompt"] for row in prompts if "dropped" not in row][: SETTINGS["num_prompts"]]
    assert [row["messages"][-2]["content"] for row in rows] == sorted(own, key=len)
    assert [row["sampled"] for row in rows] == [False] * 4 + [True] * 3
    dataset = load_conversations(str(written / "a.jsonl"))
    _, report = prepare_dataset(dataset, make_chat_tokenizer(), target.config, max_length=400)
    assert report.num_texts == SETTINGS["num_prompts"]
    assert not report.problems


def test_greedy_answers_are_what_generate_says(target: PreTrainedModel, written: Path) -> None:
    tokenizer, greedy = make_chat_tokenizer(), [row for row in read(written / "a.jsonl") if not row["sampled"]]
    for row in greedy:
        ids = tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = target.generate(**ids, do_sample=False, max_new_tokens=SETTINGS["max_new_tokens"])
        new = output[0, ids["input_ids"].shape[1] :]
        assert row["messages"][-1]["content"] == tokenizer.decode(new[: -1 if row["ended"] else None])
        assert row["ended"] == (new[-1] == tokenizer.eos_token_id)


@pytest.mark.parametrize(("num_bytes", "num_prompt_bytes"), [(0, 0), (0, 700), (250, 10**6), (10**6, 10**6)])
def test_a_killed_run_goes_on_to_the_same_result(
    target: PreTrainedModel, written: Path, tmp_path: Path, num_bytes: int, num_prompt_bytes: int
) -> None:
    for name, size in (("a.jsonl", num_bytes), ("a.prompts.jsonl", num_prompt_bytes)):
        (tmp_path / name).write_bytes((written / name).read_bytes()[:size])
    synthesize(target, tmp_path / "a.jsonl")
    for name in ("a.jsonl", "a.prompts.jsonl"):
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes()


def test_a_file_begun_with_other_settings_is_refused(target: PreTrainedModel, written: Path) -> None:
    with pytest.raises(ValueError, match="was created with different settings: max_new_tokens"):
        synthesize(target, written / "a.jsonl", max_new_tokens=13)


def test_a_second_run_into_a_file_is_refused(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it cuts the first one's unfinished batch off."""
    refused = []

    def start_again(*arguments: Any) -> Any:
        with pytest.raises(OSError, match=r"Another run is writing there. Wait for it to end") as error:
            synthesize(target, tmp_path / "a.jsonl")
        refused.append(error)
        return write_user_turns(*arguments)

    monkeypatch.setattr(synthesis, "write_user_turns", start_again)
    synthesize(target, tmp_path / "a.jsonl")
    assert refused


def test_prompts_begun_with_other_settings_are_refused(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was stopped before the first answer."""
    monkeypatch.setattr(synthesis, "regenerate_dataset", _stop)
    with pytest.raises(KeyboardInterrupt):
        synthesize(target, tmp_path / "a.jsonl", temperature=2.0)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"a.prompts.jsonl' was created with different settings: temperature"):
        synthesize(target, tmp_path / "a.jsonl")


def _stop(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_openings_take_turns(target: PreTrainedModel, tmp_path: Path) -> None:
    openings = ["import ", "Write a class:\n\nclass", "def "]
    synthesize(target, tmp_path / "a.jsonl", num_prompts=6, openings=openings, batch_size=6)
    for row, opening in zip(read(tmp_path / "a.prompts.jsonl")[:6], openings * 2, strict=True):
        assert row["prompt"].startswith(opening.strip())
        assert len(row["prompt"]) > len(opening)
    with pytest.raises(ValueError, match="created with different settings: openings"):
        synthesize(target, tmp_path / "a.jsonl", num_prompts=6, openings=[], batch_size=6)


def test_what_follows_an_opening_is_the_targets(target: PreTrainedModel) -> None:
    tokenizer = make_chat_tokenizer()
    (text,) = write_user_turns(target, tokenizer, 12, Sampling(temperature=0.01), ["import numpy as"], seed=0)
    ids = tokenizer("<|im_start|>user\nimport numpy as", return_tensors="pt", add_special_tokens=False)
    expected = target.generate(**ids, max_new_tokens=12, do_sample=False)[0]
    assert text.text == find_user_turn(tokenizer).cut(tokenizer.decode(expected).split("user\n", 1)[1])


def test_what_follows_an_opening_keeps_its_space(target: PreTrainedModel) -> None:
    """A tokenizer whose decoder takes the space in front of a text away, as Llama 2's does."""
    words = ["<unk>", "<|im_end|>", "▁who", "▁wrote", "▁the", "▁book", "▁user", "▁"]
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    template = "{% for m in messages %}user {{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template, unk_token="<unk>"
    )
    prompts = []

    def written(_: PreTrainedModel, rows: list[list[int]], *__: Any) -> list[list[int]]:
        prompts.extend(rows)
        return [[4, 5, 1]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "continue_rows", written)
        (text,) = write_user_turns(target, tokenizer, 3, Sampling(), ["who wrote"], seed=0)
    assert text.text == "who wrote the book"
    assert tokenizer.convert_ids_to_tokens(prompts[0]) == ["▁user", "▁who", "▁wrote"]


def test_an_opening_that_nothing_follows_is_no_prompt(target: PreTrainedModel, tmp_path: Path) -> None:
    writer = make_chat_target(mean_length=1.5)
    synthesize(writer, tmp_path / "a.jsonl", num_prompts=3, openings=["Tell me how to sort a list of words"])
    rows = read(tmp_path / "a.prompts.jsonl")
    bare = [row for row in rows if row["prompt"] == "Tell me how to sort a list of words"]
    assert bare
    assert all(row["dropped"] == "nothing after its opening" for row in bare)


def test_a_target_that_writes_nothing_of_use_is_told(tmp_path: Path) -> None:
    endless = make_chat_target(mean_length=1e9)
    with pytest.raises(
        ValueError, match=r"Of 40 prompts that the target wrote, 0 are of use. Dropped: 40 \(does not end\)"
    ):
        synthesize(endless, tmp_path / "a.jsonl", max_prompt_tokens=4)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template.*--chat_template FILE"),
        ("{{ raise_exception('no') }}", "refuses a user's turn: no. Give another template"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "writes nothing before it.*--data FILE"),
        ("Hello.", "shows it 0 times"),
        ("{{ messages[0].content }} {{ messages[0].content }}", "shows it 2 times"),
    ],
)
def test_a_template_without_a_user_opening_is_refused(
    target: PreTrainedModel, tmp_path: Path, template: str | None, message: str
) -> None:
    with pytest.raises(UserTurnNotFoundError, match=message):
        synthesize(target, tmp_path / "a.jsonl", template=template)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "ended", "reason"),
    [
        ("How do I sort a list of words by length in Python?", True, None),
        ("¿Cómo se prepara una buena tortilla de patatas?", True, None),
        ("Wie backe ich Brot? 日本の歴史について教えてください。", True, None),
        ("How do I sort", False, "does not end"),
        ("Hi", True, "too short"),
        ("What is <|im_start|>user about?", True, "garbled"),
        ("What is \ufffd\ufffd about, please?", True, "garbled"),
        ("1 + 2 = 3 + 4 = 5 + 6 =", True, "hardly any letters"),
        ("I am sorry about that. " * 12, True, "repeats itself"),
        ("What is a veryveryveryveryveryveryveryvery long word?", True, "repeats itself"),
    ],
)
def test_degenerate_prompts_are_told(text: str, ended: bool, reason: str | None) -> None:
    assert why_degenerate(text, ended, ["<|im_start|>"]) == reason


def test_near_duplicates_are_found_among_thousands() -> None:
    seen = NearDuplicates()
    words = ["river", "stone", "cloud", "paper", "engine", "garden", "window", "music", "number", "color"]
    texts = [
        f"Tell me how {words[i % 10]} {words[i // 10 % 10]} and {words[i // 100 % 10]} meet in city {i}"
        for i in range(2000)
    ]
    assert seen.add("Can you explain how the heart pumps blood through all of the human body?")
    for text in texts:
        seen.add(text)
    assert not seen.add("Can you explain how the heart pumps blood through all of the human body?")
    assert not seen.add("can you explain how the heart pumps blood through all of the human body")
    assert not seen.add("Please, can you explain how the heart pumps blood through all of the human body?")
    assert seen.add("Can you explain how the moon pulls water over the shores of an ocean?")


@pytest.mark.parametrize("top_p", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("vocab_size", [40, 3000])
def test_the_nucleus_is_that_of_transformers(top_p: float, vocab_size: int) -> None:
    """Also where it holds more tokens than are looked at first."""
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.1], [3]] * 3)
    expected = TopPLogitsWarper(top_p)(None, logits / 1.5)
    found = Nucleus(Sampling(1.5, top_p))(None, logits)
    both = found.isfinite() & expected.isfinite()
    torch.testing.assert_close(found[both], expected[both])
    # Rounding of the sums decides about the last token of a nucleus.
    assert (found.isfinite() != expected.isfinite()).sum(dim=1).max() <= 1
    if vocab_size == 3000 and top_p == 0.3:
        kept = found.isfinite().sum(dim=1)
        assert kept.min() < 256 < kept.max()


# In float64, eager attention makes NaN of padding's scores.
@pytest.mark.parametrize("family", ["llama", "phi3_sliding", "qwen2_mixed", "gpt_oss", "gpt2"])
@pytest.mark.parametrize(
    "prompts", [[[3, 1, 4, 1, 5], [3, 1, 4, 2], [3, 1, 7, 5, 6, 2, 3]], [[1, 2, 3]] * 3, [[1], [2, 5], [3] * 9]]
)
def test_rows_of_a_batch_do_not_see_each_other(
    family: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when some have left it."""
    monkeypatch.setattr(row_leaving, "_NUM_TOKENS", 3)
    target = make_target(family)
    plain = [target.generate(torch.tensor([p]), do_sample=False, max_new_tokens=20)[0].tolist() for p in prompts]
    ends = {plain[0][len(prompts[0]) + 4]}  # the first row ends here at the latest
    found = continue_rows(target, prompts, 20, ends)
    for prompt, new, tokens in zip(prompts, found, plain, strict=True):
        assert prompt + new == tokens[: len(prompt) + len(new)]
        assert len(new) == 20 or new[-1] in ends
        assert not ends & set(new[:-1])


def test_rows_that_end_take_no_further_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    target, sizes = make_target(), []
    plain = target.generate

    def generate(ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        sizes.append(len(ids))
        return plain(ids, **kwargs)

    monkeypatch.setattr(row_leaving, "_NUM_TOKENS", 2)
    target.generation_config.eos_token_id = None
    first = plain(torch.tensor([[3, 1, 4]]), do_sample=False, max_new_tokens=1)[0, -1].item()
    monkeypatch.setattr(target, "generate", generate)
    found = continue_rows(target, [[3, 1, 4], [2, 7, 1], [5, 5, 6, 6]], 8, {first})
    assert found[0] == [first]
    left = [sum(len(new) > step for new in found) for step in (0, 2, 4, 6)]
    assert sizes == [size for size in left if size]
    assert sizes[1] < 3


def test_an_offloaded_target_writes_what_it_writes_in_memory() -> None:
    """Its first parameters are on no device, and neither the tokens nor the randomness can be there."""
    prompts = [[1, 2, 3, 4], [1, 2, 5], [1, 3, 3, 3, 2]]
    found = []
    for place in (lambda target: target, cpu_offload):
        torch.manual_seed(3)
        found.append(continue_rows(place(make_target().float()), prompts, 10, {7}, Sampling()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampled_share": 1.5}, "`sampled_share` must be between 0 and 1, got 1.5"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"num_prompts": -1}, "`num_prompts` must be at least 0, got -1"),
        ({"num_prompts": 0}, "nothing to answer"),
    ],
)
def test_settings_out_of_range_are_refused(
    target: PreTrainedModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        synthesize(target, tmp_path / "a.jsonl", **changes)
