"""A dataset in which the target answers itself."""

import errno
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_target import make_chat_target, make_chat_tokenizer
from datasets import Dataset
from full_disk import disk_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from training_data import (
    CHATML,
    DEMO_TARGET,
    FORGETFUL,
    MARKED,
    MESSAGES,
    OPENING,
    STRICT,
    make_ending_tokenizer,
    make_tokenizer,
)
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from transformers_gumiho.resumable_file import check_begun_with
from transformers_gumiho.training import (
    Sampling,
    load_conversations,
    prepare_dataset,
    regenerate_dataset,
    regeneration,
)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32).eval()


def regenerate(
    rows: list[dict[str, Any]], target: PreTrainedModel, path: Path, template: str | None = CHATML, **settings: Any
) -> list[dict[str, Any]]:
    settings = {"max_length": 64, "batch_size": 2} | settings
    dataset = Dataset.from_list(rows)
    regenerate_dataset(dataset, target, make_tokenizer(template), path, **settings)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answer(target: PreTrainedModel, prompt: str, num_tokens: int) -> str:
    """What the target says to a prompt by itself."""
    ids = make_tokenizer()(prompt, return_tensors="pt")["input_ids"]
    output = target.generate(ids, do_sample=False, max_new_tokens=num_tokens)
    return make_tokenizer().decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_each_answer_is_the_targets_after_its_own_earlier_ones(target: PreTrainedModel, tmp_path: Path) -> None:
    short = [MESSAGES[1], {"role": "assistant", "content": "ignored"}]
    rows = regenerate(
        [{"messages": short}, {"messages": MESSAGES}], target, tmp_path / "out.jsonl", max_new_tokens=8, max_length=200
    )
    tokenizer = make_tokenizer()
    for row, source in zip(rows, (short, MESSAGES), strict=True):
        messages = row["messages"]
        assert [m["role"] for m in messages] == [m["role"] for m in source]
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                assert message == source[index]
                continue
            prompt = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
            assert message["content"] == answer(target, prompt, 8)


@pytest.mark.parametrize(
    "question",
    [
        {"messages": MESSAGES[:2]}, {"prompt": MESSAGES[:2]},
        {"conversations": [{"from": m["role"], "value": m["content"]} for m in MESSAGES[:2]]},
    ],
)  # fmt: skip
def test_questions_without_an_answer_are_answered(
    question: dict[str, Any], target: PreTrainedModel, tmp_path: Path
) -> None:
    (row,) = regenerate([question], target, tmp_path / "out.jsonl", max_new_tokens=8, max_length=200)
    prompt = make_tokenizer().apply_chat_template(MESSAGES[:2], tokenize=False, add_generation_prompt=True)
    assert row["messages"] == [*MESSAGES[:2], {"role": "assistant", "content": answer(target, prompt, 8)}]


def test_a_share_of_the_batches_is_sampled(target: PreTrainedModel, tmp_path: Path) -> None:
    rows = [{"prompt": f"def f{index}(self):\n    return"} for index in range(8)]
    sampling = {"sampling": Sampling(1.0, 0.95, share=0.5), "max_new_tokens": 12}
    found = regenerate(rows, target, tmp_path / "a.jsonl", None, **sampling)
    greedy = regenerate(rows, target, tmp_path / "b.jsonl", None, max_new_tokens=12)
    assert [row["sampled"] for row in found] == [False, False, True, True] * 2
    same = [row["completion"] == other["completion"] for row, other in zip(found, greedy, strict=True)]
    assert all(same[index] for index in (0, 1, 4, 5))
    assert not all(same)


def test_texts_are_continued(target: PreTrainedModel, tmp_path: Path) -> None:
    text = "def __init__(self, name):\n        self.name = name\n"
    rows = regenerate(
        [{"text": text, "prompt": None, "completion": None}, {"prompt": "class A:", "completion": "x"}],
        target, tmp_path / "out.jsonl", None, num_prompt_tokens=6, max_new_tokens=10,
    )  # fmt: skip
    tokenizer = make_tokenizer()
    prompt = tokenizer.decode(tokenizer(text)["input_ids"][:6])
    assert rows[0] == {"prompt": "class A:", "completion": answer(target, "class A:", 10), "ended": False}
    assert rows[1] == {"text": prompt + answer(target, prompt, 10), "ended": False}


def test_rows_of_similar_length_are_answered_together(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding is then short; each answer is what the target says to the prompt alone."""
    batches, real = [], regeneration.continue_rows

    def spy(target: PreTrainedModel, prompts: list[list[int]], *args: Any) -> list[list[int]]:
        batches.append([len(prompt) for prompt in prompts])
        return real(target, prompts, *args)

    monkeypatch.setattr(regeneration, "continue_rows", spy)
    monkeypatch.setattr(regeneration, "_SORTED_BATCHES", 3)
    prompts = ["x = 1\n" * count for count in (9, 1, 8, 2, 7, 3, 1, 9)]
    rows = regenerate([{"prompt": prompt} for prompt in prompts], target, tmp_path / "out.jsonl", None, max_length=90)
    window = sorted(prompts[:6], key=len)
    assert [row["prompt"] for row in rows] == [*window, *sorted(prompts[6:], key=len)]
    assert len(batches) == 4
    lengths = [length for batch in batches[:3] for length in batch]
    assert lengths == sorted(lengths)
    for row in rows:
        said = answer(target, row["prompt"], 90)
        assert said.startswith(row["completion"]), row


@pytest.mark.parametrize("template", [CHATML, MARKED, FORGETFUL, OPENING, None])
def test_training_reads_the_tokens_that_the_target_wrote(
    tmp_path: Path, template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Special ones, too, and those of texts that encode to other tokens, and no end where an answer was cut."""
    target, tokenizer = make_chat_target(), make_chat_tokenizer(template)
    wrote, end, plain = [], tokenizer.eos_token_id, target.generate

    def generate(ids: torch.Tensor, attention_mask: torch.Tensor, **settings: Any) -> torch.Tensor:
        output = plain(ids, attention_mask=attention_mask, **settings)
        for row, mask, new in zip(ids, attention_mask.bool(), output[:, ids.shape[1] :].tolist(), strict=True):
            wrote.append((tuple(row[mask].tolist()), tuple(new[: new.index(end) + 1] if end in new else new)))
        return output

    monkeypatch.setattr(target, "generate", generate)
    rows: list[dict[str, Any]] = [{"messages": MESSAGES[index % 2 :]} for index in range(6)]
    if template is None:
        rows = [{"prompt": f"import {name}", "completion": "x"} for name in ("os", "re", "sys", "abc")]
    regenerate_dataset(
        Dataset.from_list(rows), target, tokenizer, tmp_path / "a.jsonl", max_new_tokens=12, max_length=400,
        sampling=Sampling(top_p=1.0), batch_size=3,
    )  # fmt: skip
    dataset = load_conversations(str(tmp_path / "a.jsonl"))
    prepared, _ = prepare_dataset(dataset, tokenizer, target.config, max_length=400, packing=False)
    learned = Counter(pair for row in prepared for pair in answers_of(row["input_ids"], row["loss_mask"]))
    # The state of an answer of one token is not followed by one that could be learned.
    assert learned == Counter(pair for pair in wrote if len(pair[1]) > 1)
    assert {new[-1] == end for _, new in wrote} == {True, False}
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()]
    # Another tokenizer's tokens are not these.
    foreign = make_ending_tokenizer()
    foreign.chat_template = CHATML
    written = Dataset.from_list([line for line in lines if "written" in line])
    assert len(written)
    with pytest.raises(ValueError, match=f"{len(written)} skipped(?s:.*)its `written` tokens are another tokenizer's"):
        prepare_dataset(written, foreign, target.config, max_length=400)


def test_a_continued_text_keeps_its_special_tokens(tmp_path: Path) -> None:
    """Those within it, and not the one that the tokenizer puts before every text, which it would put there again."""
    target, tokenizer = make_chat_target(), make_chat_tokenizer(None)
    bos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    dataset = Dataset.from_list([{"text": f"import os<|endoftext|>x{index}"} for index in range(6)])
    settings = {"max_length": 100, "max_new_tokens": 8, "sampling": Sampling(top_p=1.0)}
    regenerate_dataset(dataset, target, tokenizer, tmp_path / "a.jsonl", **settings)
    written = load_conversations(str(tmp_path / "a.jsonl"))
    rows, report = prepare_dataset(written, tokenizer, target.config, max_length=100, packing=False)
    assert len(rows) + report.problems["no token to learn within the maximum length"] == 6
    for row in rows:
        assert row["input_ids"].count(bos) >= 2
        assert row["input_ids"][1] != bos


def answers_of(ids: list[int], mask: list[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields for each run of states that count what was read before, and the tokens."""
    edges = [index for index in range(1, len(ids)) if mask[index] != mask[index - 1]]
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        yield tuple(ids[:first]), tuple(ids[first : last + 1])


@pytest.mark.parametrize("num_bytes", [0, 10, 400, 10**6])
def test_a_killed_run_goes_on_to_the_same_result(target: PreTrainedModel, tmp_path: Path, num_bytes: int) -> None:
    rows = [{"text": f"def f{index}(self):\n    return"} for index in range(5)] + [{"text": None}]
    sampling = {"sampling": Sampling(top_p=1.0)}
    whole = regenerate(rows, target, tmp_path / "whole.jsonl", None, **sampling)
    killed = tmp_path / "killed.jsonl"
    killed.write_bytes((tmp_path / "whole.jsonl").read_bytes()[:num_bytes])
    assert regenerate(rows, target, killed, None, **sampling) == whole
    assert len({row["text"] for row in whole if "text" in row}) == 5


def test_a_second_run_into_a_file_is_refused(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, path = [{"text": f"def f{index}(self):\n    return"} for index in range(4)], tmp_path / "a.jsonl"
    real, refused = regeneration.append_rows, []

    def append_and_start_again(*arguments: Any) -> None:
        real(*arguments)
        with pytest.raises(OSError, match=r"Another run is writing there.*a.jsonl") as error:
            regenerate(rows, target, path, None)
        refused.append(error)

    monkeypatch.setattr(regeneration, "append_rows", append_and_start_again)
    assert len(regenerate(rows, target, path, None)) == 4
    assert len(refused) == 2


def test_a_full_disk_keeps_what_was_written(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"def f{index}(self):\n    return"} for index in range(4)]
    path, whole = tmp_path / "a.jsonl", regenerate(rows, target, tmp_path / "whole.jsonl", None)
    num_bytes = (tmp_path / "whole.jsonl").stat().st_size - 20
    monkeypatch.setattr(Path, "open", disk_of(num_bytes, Path.open, "a.jsonl"))
    with pytest.raises(OSError, match=r"a.jsonl': No space left on device. What was written before stays. Make room"):
        regenerate(rows, target, path, None)
    assert path.stat().st_size == num_bytes
    # Nor does a disk that is still full when it is started again forget what the file was begun with.
    monkeypatch.setattr(Path, "write_text", _no_room)
    with pytest.raises(OSError, match="No space left on device"):
        regenerate(rows, target, path, None)
    monkeypatch.undo()
    assert regenerate(rows, target, path, None) == whole


def _no_room(path: Path, *_: Any, **__: Any) -> None:
    path.write_bytes(b"")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_before_the_first_row_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", _no_room)
        with pytest.raises(OSError, match=r"Could not write '.*a.jsonl.settings.json': No space left on device"):
            check_begun_with(tmp_path / "a.jsonl", {"seed": 0})
    check_begun_with(tmp_path / "a.jsonl", {"seed": 1})


def test_damaged_settings_beside_a_file_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "a.jsonl.settings.json").write_text("")
    with pytest.raises(ValueError, match=r"a.jsonl.settings.json' is damaged. .* Delete it to continue"):
        check_begun_with(tmp_path / "a.jsonl", {"seed": 0})


def test_a_file_begun_with_other_settings_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    rows = [{"text": "import os"}]
    regenerate(rows, target, tmp_path / "out.jsonl", None, max_new_tokens=4)
    with pytest.raises(
        ValueError,
        match=r"different settings: max_new_tokens \(4, now 5\), seed \(0, now 1\)\. Write into another",
    ):
        regenerate(rows, target, tmp_path / "out.jsonl", None, max_new_tokens=5, seed=1)
    with pytest.raises(ValueError, match="was created with different settings: template"):
        regenerate(rows, target, tmp_path / "out.jsonl", max_new_tokens=4)


def test_the_space_before_an_answer_is_kept() -> None:
    """Tokenizers that write a space as a part of the next word drop it at the beginning of a text."""
    words = Tokenizer(models.WordLevel({"▁def": 0, "▁f": 1, "▁return": 2, "<unk>": 3}, unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    writer = regeneration.TargetWriter(None, tokenizer, 64, 8)
    assert tokenizer.decode([2]) == "return"
    assert writer.decode_after([0, 1], [2]) == " return"


def test_a_target_that_overflows_writes_nothing(tmp_path: Path) -> None:
    large = make_chat_target().half()
    large.model.norm.weight.data.fill_(6e4)
    with pytest.raises(
        ValueError, match=r"not finite \(torch.float16\). It overflows in float16: load it in bfloat16"
    ):
        regenerate([{"messages": MESSAGES}], large, tmp_path / "out.jsonl", max_length=100)


def test_rows_without_an_answer_say_why(target: PreTrainedModel, tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x = 1\n" * 100}, MESSAGES[2]]
    rows = regenerate([{"messages": None}, {"messages": long}], target, tmp_path / "out.jsonl")
    assert "has none of" in rows[0]["skipped"]
    assert rows[1] == {"skipped": "no room for an answer"}
    twice = [MESSAGES[1], MESSAGES[1], MESSAGES[2]]
    rows = regenerate([{"messages": MESSAGES[1:3]}, {"messages": twice}], target, tmp_path / "strict.jsonl", STRICT)
    assert rows[0]["messages"][0] == MESSAGES[1]
    assert rows[1] == {"skipped": "the chat template refuses it: roles must alternate"}
    dataset = load_conversations(str(tmp_path / "strict.jsonl"))
    _, report = prepare_dataset(dataset, make_tokenizer(STRICT), target.config, max_length=64)
    assert report.problems == {"the chat template refuses it: roles must alternate": 1}
