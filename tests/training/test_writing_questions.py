"""Questions that a target asks itself."""

from pathlib import Path
from typing import Any

import pytest
from chat_target import make_chat_target, make_chat_tokenizer
from commands import gumiho, refuse
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from training_data import CHATML, read_jsonl
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from transformers_gumiho.training import LocalEngine, Sampling, UserTurnNotFoundError, synthesize_dataset
from transformers_gumiho.training.writing import questions
from transformers_gumiho.training.writing.questions import why_degenerate


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_chat_target()


def synthesize(target: PreTrainedModel, path: Path, num_prompts: int = 7, **settings: Any) -> list[str]:
    tokenizer = settings.pop("tokenizer", make_chat_tokenizer(settings.pop("template", CHATML)))
    engine, settings = LocalEngine(target, settings.pop("batch_size", 4)), {"max_prompt_tokens": 40} | settings
    dataset = synthesize_dataset(num_prompts, engine, tokenizer, path, **settings)
    return [row["messages"][0]["content"] for row in dataset]


def test_the_command_asks_by_the_template_of_a_file(target: PreTrainedModel, tmp_path: Path) -> None:
    """It samples with the settings that are given."""
    target.save_pretrained(tmp_path / "target")
    make_chat_tokenizer(None).save_pretrained(tmp_path / "target")
    (tmp_path / "template.jinja").write_text(CHATML)
    words = ["data", "--target", tmp_path / "target", "--data", "none", "--num_prompts", 3, "--top_k", 50]
    words += ["--max_new_tokens", 4, "--max_prompt_tokens", 40, "--output_file", tmp_path / "a.jsonl"]
    refuse("has no chat template", *words)
    gumiho(*words, "--chat_template", tmp_path / "template.jinja")
    tokenizer = make_chat_tokenizer()
    for row in read_jsonl(tmp_path / "a.jsonl"):
        asked = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=True)
        assert row["generations"][0]["prompt_ids"] == asked["input_ids"]
    assert "top_k=50" in (tmp_path / "a.prompts.jsonl.made_from.json").read_text()


def test_what_follows_an_opening_is_the_targets(target: PreTrainedModel, tmp_path: Path) -> None:
    tokenizer, openings = make_chat_tokenizer(), ["import numpy as", "def f(", "x = ", "class A", "return self."]
    settings: dict[str, Any] = {"batch_size": 5, "sampling": Sampling(temperature=0.01), "max_prompt_tokens": 12}
    with pytest.raises(ValueError, match="0 are of use"):
        synthesize(target, tmp_path / "a.jsonl", 1, openings=openings, **settings)
    rows = sorted(read_jsonl(tmp_path / "a.jsonl"), key=lambda row: row["row"])
    found = [row["prompt"] for row in rows[:5]]
    for opening, text in zip(openings, found, strict=True):
        ids = tokenizer(f"<|im_start|>user\n{opening}", return_tensors="pt", add_special_tokens=False)
        said = tokenizer.decode(target.generate(**ids, max_new_tokens=12, do_sample=False)[0])
        assert text == said.split("user\n", 1)[1].split("<|im_end|>")[0].strip()
    assert max(len(text) - len(opening) for opening, text in zip(openings, found, strict=True)) > 10


def test_what_follows_an_opening_keeps_its_space(target: PreTrainedModel, tmp_path: Path) -> None:
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

    class Engine(LocalEngine):
        def run(self, tasks: Any) -> Any:
            for number, task in tasks:
                prompts.append(task.send(None).prompt_ids)
                with pytest.raises(StopIteration) as ended:
                    task.send(([4, 5, 1], True))
                yield number, ended.value.value

    engine = Engine(target, 1)
    dataset = synthesize_dataset(1, engine, tokenizer, tmp_path / "a.jsonl", openings=["who wrote"])
    assert dataset[0]["messages"][0]["content"] == "who wrote the book"
    assert tokenizer.convert_ids_to_tokens(prompts[0]) == ["▁user", "▁who", "▁wrote"]


def test_an_opening_that_nothing_follows_is_no_prompt(tmp_path: Path) -> None:
    opening = "Tell me how to sort a list of words"
    synthesize(make_chat_target(mean_length=1.5), tmp_path / "a.jsonl", 3, openings=[opening])
    bare = [row for row in read_jsonl(tmp_path / "a.jsonl") if row["prompt"] == opening]
    assert bare
    assert all(row["dropped"] == "nothing after its opening" for row in bare)


def test_a_target_that_writes_nothing_of_use_is_told(tmp_path: Path) -> None:
    message = r"Of 40 prompts that the target wrote, 0 are of use. Dropped: 40 \(does not end\)"
    with pytest.raises(ValueError, match=message):
        synthesize(make_chat_target(mean_length=1e9), tmp_path / "a.jsonl", max_prompt_tokens=4)
    with pytest.raises(ValueError, match="at least 1 prompt of 1 token, got 0 of 4"):
        synthesize(make_chat_target(), tmp_path / "b.jsonl", 0, max_prompt_tokens=4)


def test_duplicates_are_dropped(target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "why_degenerate", lambda *_: None)
    settings: dict[str, Any] = {"sampling": Sampling(temperature=0.01), "batch_size": 20}
    with pytest.raises(ValueError, match=r"Of \d+ prompts that the target wrote, 1 are of use. Dropped: \d+ \(a dupl"):
        synthesize(target, tmp_path / "a.jsonl", 2, **settings)


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
        ("Hi", True, "too short or garbled"),
        ("What is <|im_start|>user about?", True, "too short or garbled"),
        ("What is \ufffd\ufffd about, please?", True, "too short or garbled"),
        ("I am sorry about that. " * 12, True, "repeats itself"),
    ],
)
def test_degenerate_prompts_are_told(text: str, ended: bool, reason: str | None) -> None:
    assert why_degenerate(text, ended, ["<|im_start|>"]) == reason
