"""Training data without data: the target's own prompts and answers."""

import errno
import json
import runpy
import shutil
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from chat_target import make_chat_target, make_chat_tokenizer
from full_disk import disk_of
from targets import make_target
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from trainers import losses_of, make_args
from training_data import CHATML, DEMO_TARGET, STRICT, write_jsonl
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TopPLogitsWarper

from transformers_gumiho.training import (
    CachedFeatures,
    FeatureDataset,
    GumihoDataCollator,
    GumihoTrainer,
    OnlineFeatures,
    SynthesisSettings,
    UserTurnNotFoundError,
    load_conversations,
    prepare_dataset,
    read_questions,
    synthesize_dataset,
)
from transformers_gumiho.training.synthesis import Prompt
from transformers_gumiho.training.synthesis.continuation import BatchContinuation, Continuation, Sampling
from transformers_gumiho.training.synthesis.degenerate import why_degenerate
from transformers_gumiho.training.synthesis.near_duplicates import NearDuplicates
from transformers_gumiho.training.synthesis.nucleus import sample_nucleus
from transformers_gumiho.training.synthesis.target_writer import TargetWriter
from transformers_gumiho.training.synthesis.user_turn import find_user_turn
from transformers_gumiho.training.synthesis.writing import Start


EXAMPLE = Path(__file__).parents[2] / "examples" / "synthesize_data.py"
SETTINGS: dict[str, Any] = {
    "num_prompts": 7, "batch_size": 4, "max_prompt_tokens": 40, "max_new_tokens": 12, "sampled_share": 0.5,
}  # fmt: skip
QUESTIONS = [Prompt("import what?"), Prompt("and then?", "You write Python.")]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_chat_target()


def synthesize(target: PreTrainedModel, path: Path, **arguments: Any) -> list[dict[str, Any]]:
    names = {item.name for item in fields(SynthesisSettings)} & {*arguments}
    settings = SynthesisSettings(**SETTINGS | {name: arguments.pop(name) for name in names})
    template = arguments.pop("template", CHATML)
    arguments.setdefault("questions", QUESTIONS)
    synthesize_dataset(target, make_chat_tokenizer(template), path, settings, **arguments)
    return read(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def written(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with its features, whole."""
    folder = tmp_path_factory.mktemp("whole")
    synthesize(target, folder / "a.jsonl", feature_cache=folder / "features", features_dtype=torch.float32)
    return folder


def test_every_kept_prompt_and_every_question_is_answered_once(written: Path) -> None:
    rows, prompts = read(written / "a.jsonl"), read(written / "a.prompts.jsonl")
    own = [row["prompt"] for row in prompts if "dropped" not in row][: SETTINGS["num_prompts"]]
    asked = Counter(row["messages"][-2]["content"] for row in rows)
    assert asked == Counter([*own, *(question.text for question in QUESTIONS)])
    assert {"role": "system", "content": "You write Python."} in [row["messages"][0] for row in rows]
    assert 0 < sum(row["sampled"] for row in rows) < len(rows)


def test_greedy_answers_are_what_generate_says(target: PreTrainedModel, written: Path) -> None:
    tokenizer, greedy = make_chat_tokenizer(), [row for row in read(written / "a.jsonl") if not row["sampled"]]
    for row in greedy:
        ids = tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = target.generate(**ids, do_sample=False, max_new_tokens=SETTINGS["max_new_tokens"])
        new = output[0, ids["input_ids"].shape[1] :]
        assert row["messages"][-1]["content"] == tokenizer.decode(new, skip_special_tokens=True)
        assert row["ended"] == (new[-1] == tokenizer.eos_token_id)


def test_the_dataset_can_be_trained_on(target: PreTrainedModel, written: Path) -> None:
    dataset = load_conversations(str(written / "a.jsonl"))
    _, report = prepare_dataset(dataset, make_chat_tokenizer(), target.config, max_length=400)
    assert report.num_texts == SETTINGS["num_prompts"] + len(QUESTIONS)
    assert not report.problems


def test_training_on_the_rows_is_training_on_what_was_written(target: PreTrainedModel, written: Path) -> None:
    """A random target's text hardly ever encodes back to its tokens, and half of the answers are cut."""
    dataset, cached = load_conversations(str(written / "a.jsonl")), FeatureDataset(written / "features")
    rows, _ = prepare_dataset(dataset, make_chat_tokenizer(), target.config, max_length=400, packing=False)
    for row, wrote in zip(rows, cached, strict=True):
        num_closing = len(row["input_ids"]) - len(wrote["input_ids"])
        assert row["input_ids"][: len(wrote["input_ids"])] == wrote["input_ids"].tolist()
        assert row["loss_mask"] == wrote["loss_mask"].tolist() + [0] * num_closing
    lines = read(written / "a.jsonl")
    assert {"written" in line for line in lines} == {line["ended"] for line in lines} == {True, False}


def test_the_cached_features_are_those_of_a_second_pass(target: PreTrainedModel, written: Path) -> None:
    tokenizer = make_chat_tokenizer()
    rows = FeatureDataset(written / "features", target, tokenizer)
    assert len(rows) == SETTINGS["num_prompts"] + len(QUESTIONS)
    batch = GumihoDataCollator()([rows[index] for index in range(len(rows))])
    again = OnlineFeatures(target).states({"input_ids": batch["input_ids"]}).last
    for index, (row, conversation) in enumerate(zip(rows, read(written / "a.jsonl"), strict=True)):
        length = len(row["input_ids"])
        torch.testing.assert_close(row["hidden_states"], again[index, :length], atol=1e-4, rtol=1e-4)
        prompt = tokenizer.apply_chat_template(
            conversation["messages"][:-1], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert row["input_ids"][: len(prompt)].tolist() == prompt
        counted = [0] * len(prompt) + [1] * (length - len(prompt) - 1) + [0]
        assert row["loss_mask"].tolist() == counted
    assert CachedFeatures(written / "features").make_drafter().dtype == target.dtype


def test_a_drafter_is_trained_on_the_cached_features(written: Path, tmp_path: Path) -> None:
    features, rows = CachedFeatures(written / "features"), FeatureDataset(written / "features")
    args = make_args(tmp_path, max_steps=6, per_device_train_batch_size=4, draft_vocabulary_size=40)
    trainer = GumihoTrainer(features.make_drafter().float(), args, target=features, train_dataset=rows)
    trainer.train()
    losses = losses_of(trainer)
    assert losses[-1] < losses[0]
    assert len(trainer.drafter.generation_config.draft_vocabulary) == 40


@pytest.mark.parametrize(
    ("num_bytes", "num_prompt_bytes", "num_shards"),
    [(0, 0, 0), (0, 700, 0), (10**6, 10**6, 3), (250, 10**6, 1), (10**6, 10**6, 1), (900, 10**6, 3)],
)
def test_a_killed_run_goes_on_to_the_same_result(
    target: PreTrainedModel, written: Path, tmp_path: Path, num_bytes: int, num_prompt_bytes: int, num_shards: int
) -> None:
    shutil.copytree(written, tmp_path / "run")
    for name, size in (("a.jsonl", num_bytes), ("a.prompts.jsonl", num_prompt_bytes)):
        (tmp_path / "run" / name).write_bytes((written / name).read_bytes()[:size])
    (tmp_path / "run" / "features" / "cache.json").unlink()
    for shard in sorted((tmp_path / "run" / "features").glob("shard-*"))[num_shards:]:
        shard.unlink()
    folder = tmp_path / "run"
    synthesize(target, folder / "a.jsonl", feature_cache=folder / "features", features_dtype=torch.float32)
    for name in ("a.jsonl", "a.prompts.jsonl"):
        assert (folder / name).read_bytes() == (written / name).read_bytes()
    before, after = FeatureDataset(written / "features"), FeatureDataset(folder / "features")
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first["input_ids"], second["input_ids"])
        torch.testing.assert_close(first["hidden_states"], second["hidden_states"])


@pytest.mark.parametrize("name", ["cache.json", "shard-00001.safetensors"])
def test_damaged_features_are_written_again(target: PreTrainedModel, written: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(written, folder)
    data = (folder / "features" / name).read_bytes()
    (folder / "features" / name).write_bytes(data[:-500] + bytes(500))
    synthesize(target, folder / "a.jsonl", feature_cache=folder / "features", features_dtype=torch.float32)
    assert (folder / "a.jsonl").read_bytes() == (written / "a.jsonl").read_bytes()
    for first, second in zip(FeatureDataset(written / "features"), FeatureDataset(folder / "features"), strict=True):
        assert torch.equal(first["input_ids"], second["input_ids"])
        torch.testing.assert_close(first["hidden_states"], second["hidden_states"])


def test_features_belong_to_the_answers_that_lie_next_to_them(
    target: PreTrainedModel, written: Path, tmp_path: Path
) -> None:
    """Also where those before were deleted, and their features were not."""
    folder = tmp_path / "run"
    shutil.copytree(written, folder)
    (folder / "a.jsonl").unlink()
    arguments: dict[str, Any] = {"num_prompts": 3, "feature_cache": folder / "features"}
    synthesize(target, folder / "a.jsonl", features_dtype=torch.float32, **arguments)
    rows = FeatureDataset(folder / "features")
    assert [len(row["input_ids"]) for row in rows] == [len(row["hidden_states"]) for row in rows]
    assert len(rows) == 3 + len(QUESTIONS)


def test_a_file_begun_with_other_settings_is_refused(target: PreTrainedModel, written: Path) -> None:
    with pytest.raises(ValueError, match="was begun with another feature_cache and another max_new_tokens"):
        synthesize(target, written / "a.jsonl", max_new_tokens=13)


def test_a_second_run_into_a_file_is_refused(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it cuts the first one's unfinished batch off."""
    real, refused = TargetWriter.answer, []

    def start_again(*arguments: Any) -> Any:
        for file, features in (("a.jsonl", "other"), ("other.jsonl", "features")):
            with pytest.raises(OSError, match=r"Another run is writing there. Wait for it to end") as error:
                synthesize(target, tmp_path / file, feature_cache=tmp_path / features)
            refused.append(error)
        return real(*arguments)

    monkeypatch.setattr(TargetWriter, "answer", start_again)
    synthesize(target, tmp_path / "a.jsonl", feature_cache=tmp_path / "features")
    assert len(refused) == 6


def test_prompts_begun_with_other_settings_are_refused(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was stopped before the first answer."""
    monkeypatch.setattr(TargetWriter, "answer", _stop)
    with pytest.raises(KeyboardInterrupt):
        synthesize(target, tmp_path / "a.jsonl", temperature=2.0)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"a.prompts.jsonl' was begun with another temperature"):
        synthesize(target, tmp_path / "a.jsonl")


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def test_system_prompts_take_turns(target: PreTrainedModel, tmp_path: Path) -> None:
    systems = ["You write Python.", "You are kind."]
    rows = synthesize(target, tmp_path / "a.jsonl", num_prompts=4, system_prompts=systems, questions=[])
    said = {row["messages"][0]["content"] for row in rows}
    assert said == set(systems)
    assert all(row["messages"][0]["role"] == "system" for row in rows)


def test_openings_take_turns_after_each_system_prompt(target: PreTrainedModel, tmp_path: Path) -> None:
    systems, openings = ["You write Python.", "You are kind."], ["import ", "Write a class:\n\nclass", "def "]
    synthesize(target, tmp_path / "a.jsonl", num_prompts=6, system_prompts=systems, openings=openings, batch_size=6)
    rows = read(tmp_path / "a.prompts.jsonl")[:6]
    assert [row["system"] for row in rows] == systems * 3
    for row, opening in zip(rows, [words for words in openings for _ in systems], strict=True):
        assert row["prompt"].startswith(opening.strip())
        assert len(row["prompt"]) > len(opening)
    with pytest.raises(ValueError, match="begun with another openings"):
        synthesize(target, tmp_path / "a.jsonl", num_prompts=6, system_prompts=systems, openings=[], batch_size=6)


def test_what_follows_an_opening_is_the_targets(target: PreTrainedModel) -> None:
    tokenizer = make_chat_tokenizer()
    writer = TargetWriter(target, tokenizer, 12, 12, Sampling(temperature=0.01))
    (text,) = writer.write_user_turns([Start(opening="import numpy as")], seed=0)
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
    writer, prompts = TargetWriter(target, tokenizer, 3, 3, Sampling()), []

    def written(self: BatchContinuation, rows: list[list[int]], *_: Any) -> list[Continuation]:
        prompts.extend(rows)
        return [Continuation([4, 5, 1], ended=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchContinuation, "__call__", written)
        (text,) = writer.write_user_turns([Start(opening="who wrote")], seed=0)
    assert text.text == "who wrote the book"
    assert tokenizer.convert_ids_to_tokens(prompts[0]) == ["▁user", "▁who", "▁wrote"]


def test_an_opening_that_nothing_follows_is_no_prompt(target: PreTrainedModel, tmp_path: Path) -> None:
    writer = make_chat_target(mean_length=1.5)
    synthesize(writer, tmp_path / "a.jsonl", num_prompts=3, openings=["Tell me how to sort a list of words"])
    rows = read(tmp_path / "a.prompts.jsonl")
    bare = [row for row in rows if row["prompt"] == "Tell me how to sort a list of words"]
    assert bare
    assert all(row["dropped"] == "nothing after its opening" for row in bare)
    with pytest.raises(ValueError, match="`openings` begin prompts that the target writes"):
        synthesize(target, tmp_path / "b.jsonl", num_prompts=0, openings=["Tell me"])


def test_a_full_disk_keeps_what_was_written(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = tmp_path / "a.jsonl", synthesize(target, tmp_path / "whole" / "a.jsonl")
    monkeypatch.setattr(Path, "open", disk_of(900, Path.open, "a.jsonl"))
    with pytest.raises(OSError, match=r"What was written before stays. Make room and run this again") as caught:
        synthesize(target, path)
    assert caught.value.errno == errno.ENOSPC
    assert path.stat().st_size == 900
    monkeypatch.undo()
    assert synthesize(target, path) == whole


def test_a_target_that_writes_nothing_of_use_is_told(tmp_path: Path) -> None:
    endless = make_chat_target(mean_length=1e9)
    with pytest.raises(ValueError, match=r"Of 40 prompts that the target wrote, 0 are of use \(40 does not end\)"):
        synthesize(endless, tmp_path / "a.jsonl", max_prompt_tokens=4)


@pytest.mark.parametrize("cache", [None, "features"])
def test_a_target_that_overflows_writes_nothing(tmp_path: Path, cache: str | None) -> None:
    large = make_chat_target().half()
    large.model.norm.weight.data.fill_(6e4)
    features = None if cache is None else tmp_path / cache
    with pytest.raises(ValueError, match=r"states are not finite \(torch.float16\). It overflows in float16: load it"):
        synthesize(large, tmp_path / "a.jsonl", num_prompts=0, feature_cache=features)


def test_the_opening_of_a_user_turn() -> None:
    tokenizer = make_chat_tokenizer()
    assert find_user_turn(tokenizer).opening == "<|im_start|>user\n"
    turn = find_user_turn(tokenizer, "Be kind.")
    assert turn.opening == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    assert turn.ends(tokenizer) == {tokenizer.eos_token_id}
    assert turn.cut("What?<|im_end|>\n<|im_start|>assistant") == "What?"


@pytest.mark.parametrize(
    ("template", "system", "message"),
    [
        (None, None, "has no chat template.*--chat_template FILE"),
        (STRICT, "Be kind.", "refuses a user's turn after a system prompt: roles must alternate. Leave the system"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None, "writes nothing before it.*--questions FILE"),
        ("Hello.", None, "shows it 0 times"),
        ("{{ messages[0].content }} {{ messages[0].content }}", None, "shows it 2 times"),
    ],
)
def test_a_template_without_a_user_opening_is_refused(
    target: PreTrainedModel, tmp_path: Path, template: str | None, system: str | None, message: str
) -> None:
    with pytest.raises(UserTurnNotFoundError, match=message):
        synthesize(target, tmp_path / "a.jsonl", template=template, system_prompts=[system] if system else [])
    assert not list(tmp_path.iterdir())


def test_own_questions_need_no_user_opening(target: PreTrainedModel, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    rows = synthesize(target, tmp_path / "a.jsonl", template=template, num_prompts=0)
    assert len(rows) == len(QUESTIONS)


def test_a_question_without_room_for_its_answer_is_left_out(target: PreTrainedModel, tmp_path: Path) -> None:
    rows = synthesize(target, tmp_path / "a.jsonl", num_prompts=0, questions=[Prompt("x = 1\n" * 300), *QUESTIONS])
    assert sorted(row.get("skipped", "") for row in rows) == ["", "", "no room for an answer"]


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
def test_the_nucleus_is_that_of_transformers(top_p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, num_draws = torch.randn(1, 40, generator=generator) * 2, 200_000
    expected = TopPLogitsWarper(top_p)(None, logits / 1.5).softmax(dim=-1)[0]
    drawn = sample_nucleus(logits.expand(num_draws, -1), 1.5, top_p, generator)
    found = torch.bincount(drawn, minlength=40) / num_draws
    assert not found[expected == 0].any()
    # Five standard deviations of a frequency.
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / num_draws).sqrt()).all()


# In float64, eager attention makes NaN of padding's scores.
@pytest.mark.parametrize("family", ["llama", "phi3_sliding", "qwen2_mixed", "gpt_oss", "gpt2"])
@pytest.mark.parametrize(
    "prompts", [[[3, 1, 4, 1, 5], [3, 1, 4, 2], [3, 1, 7, 5, 6, 2, 3]], [[1, 2, 3]] * 3, [[1], [2, 5], [3] * 9]]
)
def test_rows_of_a_batch_do_not_see_each_other(family: str, prompts: list[list[int]]) -> None:
    target = make_target(family)
    target.generation_config.eos_token_id = None
    write = BatchContinuation(target, {5}, Sampling(), states_dtype=torch.float64)
    for prompt, result in zip(prompts, write(prompts, 20, [False] * len(prompts), 0), strict=True):
        ids = torch.tensor([prompt])
        output = target.generate(ids, do_sample=False, max_new_tokens=20, eos_token_id=5)
        assert prompt + result.tokens == output[0].tolist()
        torch.testing.assert_close(result.states, target.get_decoder()(output).last_hidden_state[0])


@pytest.mark.parametrize("states_dtype", [None, torch.float32])
def test_an_offloaded_target_writes_what_it_writes_in_memory(states_dtype: torch.dtype | None) -> None:
    """Its first parameters are on no device, and neither the tokens nor the randomness can be there."""
    prompts, sampled = [[1, 2, 3, 4], [1, 2, 5], [1, 3, 3, 3, 2]], [True, False, True]
    expected, found = (
        BatchContinuation(place(make_target().float()), {7}, Sampling(), states_dtype)(prompts, 10, sampled, seed=3)
        for place in (lambda target: target, cpu_offload)
    )
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    if states_dtype is not None:
        for result, other in zip(found, expected, strict=True):
            torch.testing.assert_close(result.states, other.states)


def test_questions_are_read_in_both_forms(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"}]
    path = write_jsonl(tmp_path / "q.jsonl", [{"prompt": "Why?"}, {"messages": chat}, {"text": "no question"}])
    assert read_questions(path, 2) == [Prompt("Why?"), Prompt("Hello?", "Be kind.")]
    with pytest.raises(ValueError, match=r"q.jsonl:3 has no question. A line of this file is JSON with a `prompt`"):
        read_questions(path)
    write_jsonl(path_of_list := tmp_path / "list.jsonl", [{"prompt": "Why?"}, ["Why?"]])
    with pytest.raises(ValueError, match=r"list.jsonl' holds a list in line 2. Each line must be a JSON object"):
        read_questions(path_of_list)
    # Characters at which `str.splitlines` splits, too.
    write_jsonl(tmp_path / "q.jsonl", ['{"prompt": "Why\u2028or\x85how?"}'])
    assert read_questions(path) == [Prompt("Why\u2028or\x85how?")]
    with pytest.raises(ValueError, match="has 1 questions, and 2 were asked for"):
        read_questions(path, 2)
    with pytest.raises(FileNotFoundError, match="There is no file"):
        read_questions(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampled_share": 1.5}, "`sampled_share` must be between 0 and 1, got 1.5"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"num_prompts": -1}, "`num_prompts` must be at least 0, got -1"),
        ({"num_prompts": 0, "questions": []}, "nothing to answer"),
    ],
)
def test_settings_out_of_range_are_refused(
    target: PreTrainedModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        synthesize(target, tmp_path / "a.jsonl", **changes)


def test_the_example_writes_answers_and_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "template.jinja").write_text(CHATML)
    questions = write_jsonl(tmp_path / "q.jsonl", [{"prompt": "def f(x):"}, {"prompt": "import"}, {"prompt": "class"}])
    (tmp_path / "openings.txt").write_text("import\n\nWrite:\\n\\ndef \n")
    options = {
        "target_model": DEMO_TARGET, "chat_template": tmp_path / "template.jinja", "num_prompts": 1,
        "dtype": "float32", "questions": questions, "num_questions": 2, "max_new_tokens": 6,
        "output_file": tmp_path / "a.jsonl", "feature_cache": tmp_path / "features",
        "openings": tmp_path / "openings.txt",
    }  # fmt: skip
    _run_example(monkeypatch, options)
    assert len(read(tmp_path / "a.jsonl")) == len(FeatureDataset(tmp_path / "features")) == 3
    assert json.loads((tmp_path / "a.jsonl.settings.json").read_text())["openings"] == ["import", "Write:\n\ndef"]
    with pytest.raises(SystemExit, match="A server does not give its states: leave --feature_cache"):
        _run_example(monkeypatch, options | {"endpoint": "http://localhost:1"})
    with pytest.raises(SystemExit, match="has no chat template"):
        _run_example(monkeypatch, {"target_model": DEMO_TARGET, "num_prompts": 1, "output_file": tmp_path / "b.jsonl"})


def _run_example(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    monkeypatch.setattr("sys.argv", ["synthesize_data.py", *words])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
