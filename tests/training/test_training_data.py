"""From conversations to rows: what is read, which tokens count, what is skipped and reported, what is refused."""

import errno
import gzip
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, load_dataset
from datasets.arrow_writer import ArrowWriter
from tokenizers import normalizers
from training_data import (
    CHATML,
    DEMO_TARGET,
    FORGETFUL,
    MARKED,
    MESSAGES,
    STRICT,
    SYSTEM_IN_LAST_TURN,
    make_ending_tokenizer,
    make_tokenizer,
    write_jsonl,
)
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast

from transformers_gumiho.tools.benchmarking import read_prompts
from transformers_gumiho.training import GumihoDataCollator, load_conversations, prepare_dataset
from transformers_gumiho.training.collator import collate_all
from transformers_gumiho.training.data import preparation
from transformers_gumiho.training.data.conversations import read_row
from transformers_gumiho.training.data.open_text import encode_turn, with_template_kwargs
from transformers_gumiho.training.data.preparation import (
    held_out_numbers,
    read_texts,
    size_of_prompts,
    split_rows,
    usable_rows,
)


ROW = ("input_ids", "loss_mask")
ENDS_TWICE = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
ALWAYS_OPENS = CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]} for m in MESSAGES
]


@pytest.fixture(scope="module")
def config() -> PreTrainedConfig:
    return AutoConfig.from_pretrained(DEMO_TARGET)


def prepare(
    rows: list[dict[str, Any]], config: PreTrainedConfig, template: str | None = CHATML, **settings: Any
) -> Any:
    settings = {"max_length": 256, "packing": False} | settings
    return prepare_dataset(Dataset.from_list(rows), make_tokenizer(template), config, **settings)


def texts_that_count(row: dict[str, Any], template: str | None = CHATML) -> list[str]:
    """Returns the runs of tokens whose states count, each with the token after it, which is the last to be drafted."""
    tokenizer, runs = make_tokenizer(template), []
    ids, mask = row["input_ids"], [*row["loss_mask"], 0]
    for counts, run in itertools.groupby(range(len(mask)), key=mask.__getitem__):
        if counts:
            places = [*run]
            runs.append(tokenizer.decode(ids[places[0] : places[-1] + 2]))
    return runs


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("form", ["messages", "conversations", "conversation", "system", "prompt_completion"])
def test_exactly_the_assistants_tokens_count(form: str, template: str, config: PreTrainedConfig) -> None:
    row = {
        "messages": {"messages": MESSAGES},
        "conversations": {"conversations": SHAREGPT},
        "conversation": {"conversation": json.dumps(MESSAGES), "system": "There is one."},
        "system": {"conversations": SHAREGPT[1:], "system": MESSAGES[0]["content"]},
        "prompt_completion": {"prompt": MESSAGES[:4], "completion": MESSAGES[4:]},
    }[form]
    rows, report = prepare([row], config, template)
    tokenizer = make_tokenizer(CHATML)
    assert rows[0]["input_ids"] == tokenizer.apply_chat_template(MESSAGES, return_dict=True)["input_ids"]
    answers = ["import os<|im_end|>\n", "return self.path<|im_end|>\n"]
    assert texts_that_count(rows[0]) == answers[1:] if form == "prompt_completion" else answers
    assert (report.num_texts, report.num_rows, report.num_tokens) == (1, 1, len(rows[0]["input_ids"]))
    assert report.num_loss_tokens == sum(rows[0]["loss_mask"])
    assert not report.problems


def test_text_prompts_take_the_template_where_there_is_one(config: PreTrainedConfig) -> None:
    row = {"prompt": "def f(self):", "completion": " return self.x"}
    with_template, _ = prepare([row], config)
    assert texts_that_count(with_template[0]) == [" return self.x<|im_end|>\n"]
    without, _ = prepare([row], config, template=None)
    assert make_tokenizer().decode(without[0]["input_ids"]) == "def f(self): return self.x<|endoftext|>"
    assert texts_that_count(without[0], None) == [" return self.x<|endoftext|>"]


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"instruction": "what?", "input": "", "output": "import os", "text": "Below is an instruction."}, "what?"),
        ({"instruction": "what?", "context": "this", "response": "import os"}, "what?\n\nthis"),
        ({"instruction": "what?", "input": "this", "output": "import os"}, "what?\n\nthis"),
        ({"question": "what?", "answer": "import os"}, "what?"),
        ({"query": "what?", "response": "import os"}, "what?"),
        ({"prompt": "what?", "response": "import os", "input": "of another prompt"}, "what?"),
    ],
)
def test_rows_of_a_question_and_an_answer_are_read_by_any_name(
    row: dict[str, Any], question: str, tmp_path: Path
) -> None:
    for answered in (True, False):
        expected = read_row({"prompt": question, "completion": "import os"}, has_template=True, answered=answered)
        assert read_row(row, has_template=True, answered=answered) == expected
    write_jsonl(path := tmp_path / "rows.jsonl", [row])
    assert [question.turns for question in read_prompts(str(path))] == [(question,)]


@pytest.mark.parametrize("ending", ["</s>", "[SEP]"])
@pytest.mark.parametrize("completion", ["this a test", "test"])
def test_a_tokenizer_that_ends_texts_changes_nothing_else(
    completion: str, ending: str, config: PreTrainedConfig
) -> None:
    """The end of an answer is learned, and the target is asked before its end."""
    dataset = Dataset.from_list([{"prompt": "what is ", "completion": completion}])
    plain, ends = make_ending_tokenizer(""), make_ending_tokenizer(ending)
    expected, found = (prepare_dataset(dataset, t, config, max_length=32, packing=False)[0][0] for t in (plain, ends))
    assert ends.convert_ids_to_tokens(found["input_ids"]) == ["<s>", "what", "is", *completion.split(), ending]
    assert found["loss_mask"] == expected["loss_mask"] == [0, 0, 0] + [1] * len(completion.split()) + [0]
    for tokenizer in (plain, ends):
        assert tokenizer.convert_ids_to_tokens(encode_turn(tokenizer, ["what is"], [])) == ["<s>", "what", "is"]


def test_a_text_that_was_rendered_before_begins_once(config: PreTrainedConfig) -> None:
    tokenizer = make_ending_tokenizer("")
    for row in ({"text": "what is this"}, {"prompt": "what is ", "completion": "this"}):
        first, *others = row
        rendered = {first: f"<s>{row[first]}"} | {name: row[name] for name in others}
        found = [
            prepare_dataset(Dataset.from_list([of]), tokenizer, config, packing=False)[0][0] for of in (row, rendered)
        ]
        assert found[0] == found[1]
        assert tokenizer.convert_ids_to_tokens(found[1]["input_ids"]) == ["<s>", "what", "is", "this", "</s>"]
    assert tokenizer.convert_ids_to_tokens(encode_turn(tokenizer, ["<s>what is"], [])) == ["<s>", "what", "is"]


def test_a_long_text_becomes_windows_and_loses_nothing(config: PreTrainedConfig) -> None:
    text = "".join(f"def f{number}(self): return {number}\n" for number in range(60))
    rows, report = prepare([{"text": text}], config, max_length=64)
    assert make_tokenizer().decode([token for row in rows for token in row["input_ids"]]) == text + "<|endoftext|>"
    assert max(len(row["input_ids"]) for row in rows) == 64
    assert report.num_texts == len(rows) > 3
    assert report.num_truncated == 0


def test_a_long_conversation_is_truncated_and_reported(config: PreTrainedConfig) -> None:
    long = [MESSAGES[1], {"role": "assistant", "content": "import os\n" * 100}]
    unanswered = [{"role": "user", "content": "import os\n" * 100}, MESSAGES[2]]
    rows, report = prepare([{"messages": long}, {"messages": unanswered}], config, max_length=64)
    assert [len(row["input_ids"]) for row in rows] == [64]
    assert report.num_truncated == 1
    assert report.problems == {"no token to learn within the maximum length": [1]}


BROKEN = {
    "not json": "is not JSON, or not UTF-8",
    "[1, 2]": "is not a JSON object",
    '{"text": "half of \\ud83d"}': "is not JSON, or not UTF-8",
    '{"messages": "hello"}': "its conversation is not a list of messages, or is empty",
    '{"messages": []}': "its conversation is not a list of messages, or is empty",
    '{"messages": [{"role": "user"}]}': "a message has no `role` or `content`",
    '{"messages": [{"role": "user", "content": 5}]}': "the content of a message is not text",
    '{"messages": [{"role": "wizard", "content": "x"}]}': "unknown role 'wizard'",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "the assistant says nothing",
    '{"messages": [{"role": "user", "content": "x"}]}': "the assistant says nothing",
    '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}, '
    '{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}': "the assistant says nothing",
    '{"prompt": "x", "completion": ""}': "the assistant says nothing",
    '{"prompt": "x", "completion": [1]}': "has a field of an unknown form (TypeError",
    '{"text": ""}': "has none of `messages`",
    '{"messages": [{"role": "user", "content": [{"text": 5}]}]}': "the content of a message is not text",
    '{"messages": [{"role": "user", "content": [{"type": "image", "text": ""}]}]}': "the content of a message is not",
    '{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "x"}]}': "by zero",
    '{"prompt": "x", "completion": "y", "tools": "none"}': "its `tools` are no list of objects",
    '{"prompt": "x", "completion": "y", "documents": ["a page"]}': "its `documents` are no list of objects",
    '{"prompt": "x", "completion": "y", "chat_template_kwargs": "yes"}': "has a field of an unknown form",
    '{"messages": [{"role": "assistant", "tool_calls": ["f"]}]}': "its `tool_calls` are no list of objects",
    '{"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}': "has a field of an unknown form",
    '{"messages": [{"role": "assistant", "function_call": {}}]}': "has a field of an unknown form (Key",
    '{"prompt": "<image>", "completion": "y", "images": ["a.png"]}': "has a column 'images', which is not text",
    '{"prompt": "x", "completion": "y", "generations": [{"prompt_ids": [-1], "answer_ids": [1]}]}': "its `gen",
    '{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}, '
    '{"role": "assistant", "content": "z"}]}': "the chat template refuses it: roles must alternate",
}


@pytest.mark.parametrize("folder", [False, True])
def test_malformed_rows_are_skipped_counted_and_reported(
    folder: bool, tmp_path: Path, config: PreTrainedConfig
) -> None:
    good = {"messages": MESSAGES[1:]}
    name = write_jsonl(tmp_path / "a.jsonl", [good, *BROKEN, *[good] * (not folder)])
    if folder:
        name = str(tmp_path)
        (tmp_path / "b.jsonl").write_bytes(json.dumps(good).encode() + b"\n\n  \n")  # blank lines are no rows
    dataset = load_conversations(name)
    template = STRICT + "{% if 1 // messages[0].content | length %}{% endif %}"
    rows, report = prepare_dataset(dataset, make_tokenizer(template), config, max_length=256, packing=False)
    rows = list(rows)
    assert rows[0] == rows[1]
    assert len(rows) == report.num_texts == 2
    assert sum(map(len, report.problems.values())) == len(BROKEN)
    for number, reason in enumerate(BROKEN.values(), 1):
        assert any(reason in problem and number in numbers for problem, numbers in report.problems.items())
        assert reason in str(report)


@pytest.mark.parametrize("name", ["data.jsonl", "folder"])
def test_bytes_that_are_no_utf8_cost_their_own_line_and_a_byte_order_mark_none(
    name: str, tmp_path: Path, config: PreTrainedConfig
) -> None:
    good = json.dumps({"text": "import os\nimport sys\n"}).encode()
    latin = '{"text": "d\xe9f f(): return"}'.encode("latin-1")
    (tmp_path / "folder").mkdir()
    for file in ("data.jsonl", "folder/a.jsonl"):
        (tmp_path / file).write_bytes(b"\xef\xbb\xbf" + b"\n".join([good, b"\xff\xfe{", good, latin, b""]))
    report = prepare_dataset(load_conversations(str(tmp_path / name)), make_tokenizer(), config, max_length=64)[1]
    assert report.num_texts == 2
    assert report.problems == {"is not JSON, or not UTF-8": [1, 3]}


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_the_end_of_a_cut_answer_is_not_learned(template: str, config: PreTrainedConfig) -> None:
    template = template.replace("<|im_end|>", "<|endoftext|>")
    whole, cut = (prepare([{"messages": MESSAGES, "ended": e}], config, template)[0][0] for e in (True, False))
    assert texts_that_count(whole) == ["import os<|endoftext|>", "return self.path<|endoftext|>"]
    assert texts_that_count(cut) == ["import os<|endoftext|>", "return self.path"]
    for row in ({"text": "import os, re, sys", "ended": False}, {"prompt": "import ", "completion": "os, re, sys"}):
        ((text,), _), expected = prepare([row | {"ended": False}], config, None), "import os, re, sys"
        assert make_tokenizer(None).decode(text["input_ids"]) == expected


def test_files_are_read_whatever_they_are(tmp_path: Path, config: PreTrainedConfig) -> None:
    dataset = Dataset.from_list([{"conversations": SHAREGPT}] * 3)
    dataset.to_parquet(tmp_path / "data.parquet")
    dataset.to_json(tmp_path / "data.jsonl")
    (tmp_path / "data.json").write_text(json.dumps([{"conversations": SHAREGPT}] * 3))
    dataset.save_to_disk(tmp_path / "folder")
    Dataset.from_dict({"messages": [json.dumps(MESSAGES)] * 3}).to_csv(tmp_path / "data.csv")
    (tmp_path / "DATA.JSONL.GZ").write_bytes(gzip.compress((tmp_path / "data.jsonl").read_bytes()))
    cached = load_dataset("parquet", data_files=str(tmp_path / "data.parquet"), cache_dir=str(tmp_path / "cache"))
    names = [Path(cached["train"].cache_files[0]["filename"]).parent, "folder [1]", "data[1].jsonl"]
    names += ["data.parquet", "data.jsonl", "data.json", "folder", "data.csv", "DATA.JSONL.GZ"]
    (tmp_path / "folder [1]").mkdir()  # these characters are patterns elsewhere
    for name in ("data[1].jsonl", "folder [1]/a.jsonl"):
        shutil.copy(tmp_path / "data.jsonl", tmp_path / name)
    results = [
        list(prepare_dataset(load_conversations(str(tmp_path / name)), make_tokenizer(), config, max_length=256)[0])
        for name in names
    ]
    assert all(result == results[0] for result in results)
    (tmp_path / "data.txt").write_text("x")
    with pytest.raises(ValueError, match=r"data.txt' is none of \.jsonl, \.json, \.parquet, \.csv\. Convert it"):
        load_conversations(str(tmp_path / "data.txt"))
    for missing in (str(tmp_path / "missing.jsonl"), "./missing.txt", str(tmp_path / "missing")):
        with pytest.raises(FileNotFoundError, match="There is no file"):
            load_conversations(missing)
    with pytest.raises(FileNotFoundError, match=r"There is no file .*data.jsonl:train'"):
        load_conversations(str(tmp_path / "data.jsonl:train"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("data.json", '[{"text": "d\xe9f"}]'.encode("latin-1"), "UTF-8"),
        ("data.json", b"[]", "no data"),
        ("data.parquet", b"PAR1", "4 bytes"),
        ("empty", b"", "index out of range"),
    ],
)
def test_data_that_cannot_be_read_is_named(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    if data:
        (tmp_path / name).write_bytes(data)
    else:
        Dataset.from_dict({"text": []}).save_to_disk(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name}' cannot be read: .*{message}"):
        load_conversations(str(tmp_path / name))


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.csv", "folder"])
def test_a_file_that_has_changed_is_read_again_whatever_its_time(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    file = path / "a.jsonl" if name == "folder" else path
    for text in ("os", "re"):
        Dataset.from_list([{"text": text}]).to_csv(file) if name == "data.csv" else write_jsonl(file, [{"text": text}])
        os.utime(file, (1e9, 1e9))
        (row,) = load_conversations(str(path))
        assert (json.loads(row["json_line"]) if "json_line" in row else row) == {"text": text}


def test_a_full_cache_of_datasets_is_no_fault_of_the_file(
    tmp_path: Path, config: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = (write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"import {name}"}]) for name in ("os", "re"))
    rows = load_conversations(path)

    def write(self: ArrowWriter, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ArrowWriter, "finalize", write)
    message = r"The disk is full on which `datasets` keeps .* set HF_DATASETS_CACHE"
    with pytest.raises(OSError, match=message):
        load_conversations(other)
    with pytest.raises(OSError, match=message):
        prepare_dataset(rows, make_tokenizer(), config, max_length=64)


def test_a_table_of_texts_keeps_them_as_they_are(tmp_path: Path) -> None:
    rows = [{"prompt": "null", "completion": "007"}, {"prompt": "NA", "completion": None}]
    (tmp_path / "data.csv").write_text("prompt,completion\nnull,007\nNA,\n" + "1,2\n" * 10_000 + "a,b\n")
    found = load_conversations(str(tmp_path / "data.csv"))
    assert [*found.select(range(3))] == [*rows, {"prompt": "1", "completion": "2"}]
    assert found[10_002] == {"prompt": "a", "completion": "b"}, "the library reads a large file in parts"


@pytest.mark.parametrize("kind", ["numpy", "transformed"])
def test_the_format_of_a_dataset_does_not_matter(kind: str, config: PreTrainedConfig) -> None:
    plain = Dataset.from_list([{"messages": MESSAGES}] * 3)
    expected = prepare([{"messages": MESSAGES}] * 3, config)[0].to_list()
    if kind == "transformed":
        hidden = plain.rename_column("messages", "hidden")
        dataset = hidden.with_transform(lambda rows: {"messages": rows["hidden"]})
    else:
        dataset = plain.with_format(kind)
    assert prepare_dataset(dataset, make_tokenizer(), config, max_length=256, packing=False)[0].to_list() == expected
    texts = read_texts(dataset, make_tokenizer(), config, 256)
    assert "1 of 3 rows can be used, with 2 answers" in usable_rows(texts, 256)[1]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved", "one.jsonl", "one.json"])
def test_each_source_has_its_splits(kind: str, tmp_path: Path) -> None:
    """As files named by them, as a saved `DatasetDict`; a single file is `train`."""
    parts = {split: Dataset.from_list([{"text": split}] * n) for split, n in (("train", 3), ("test", 2))}
    name = tmp_path / kind
    if kind == "saved":
        DatasetDict(parts).save_to_disk(name)
    elif "." in kind:
        write_jsonl(name, parts["train"].to_list())
    else:
        name.mkdir()
        for split, part in parts.items():
            part.to_json(name / f"{split}.jsonl") if kind == "jsonl" else part.to_parquet(name / f"{split}.parquet")
    assert len(load_conversations(str(name))) == 3
    if "." not in kind:
        assert len(load_conversations(str(name), "test")) == 2
    with pytest.raises(ValueError, match="nonsense"):
        load_conversations(str(name), "nonsense")


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
def test_a_folder_of_one_kind_is_read_whole_and_one_of_several_is_refused(kind: str, tmp_path: Path) -> None:
    """Whatever its name; what `gumiho data` keeps beside a file, and notes, are no data."""
    folder = tmp_path / "data [1]"
    folder.mkdir()
    for number in range(2):
        rows = Dataset.from_list([{"text": f"{kind} {number}"}])
        getattr(rows, f"to_{kind.removesuffix('l')}")(folder / f"{number} [x].{kind}")
    for name in (f"0.{kind}.made_from.json", "notes.txt"):
        (folder / name).write_text("{}")
    assert len(load_conversations(str(folder))) == 2
    (folder / ("more.csv" if kind == "parquet" else "more.parquet")).write_text("text")
    with pytest.raises(ValueError, match=r"holds data files of several kinds: .*\. Name a file"):
        load_conversations(str(folder))


def test_a_folder_is_read_as_its_card_says(tmp_path: Path) -> None:
    """As in repositories of the Hub."""
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "a.jsonl", [{"text": name}])
    assert len(load_conversations(str(tmp_path))) == 2
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: new/*.jsonl\n---\n")
    assert load_conversations(str(tmp_path)).to_list() == [{"text": "new"}]


@pytest.mark.parametrize("template", [ENDS_TWICE, ALWAYS_OPENS])
def test_what_a_template_writes_after_an_answer_is_not_learned(template: str) -> None:
    """The end of the whole text (Phi-3.5), or the opening of a further answer (DeepSeek Coder)."""
    tokenizer = make_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    config, dataset = LlamaConfig(vocab_size=len(tokenizer)), Dataset.from_list([{"messages": MESSAGES}])
    rows, _ = prepare_dataset(dataset, tokenizer, config, packing=False)
    learned = [token if counts else 0 for token, counts in zip(*map(rows[0].get, ROW), strict=True)]
    texts = tokenizer.decode(learned).split(tokenizer.decode(0))
    assert [text for text in texts if text] == ["import os", "return self.path"]
    assert len(rows) == 1, "the turns are one text"


def test_packing_keeps_every_text_whole_and_wastes_little(config: PreTrainedConfig) -> None:
    texts = [f"x{number} = {number}\n" * (1 + number % 7) for number in range(200)]
    dataset = Dataset.from_list([{"text": text} for text in texts])
    tokenizer = make_tokenizer()
    rows = list(prepare_dataset(dataset, tokenizer, config, max_length=128)[0])
    unpacked = []
    for row in rows:
        assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["position_ids"]) <= 128
        starts = [index for index, position in enumerate(row["position_ids"]) if position == 0]
        for start, stop in zip(starts, [*starts[1:], len(row["input_ids"])], strict=True):
            assert row["position_ids"][start:stop] == list(range(stop - start))
            # No prediction goes from a text's end into the next one.
            assert row["loss_mask"][stop - 1] == 0
            unpacked.append(tokenizer.decode(row["input_ids"][start:stop]).removesuffix("<|endoftext|>"))
    assert sorted(unpacked) == sorted(texts)
    assert sum(len(row["input_ids"]) for row in rows) / (128 * len(rows)) > 0.9


@pytest.mark.parametrize("template", [FORGETFUL, SYSTEM_IN_LAST_TURN])
def test_turns_that_a_template_shows_differently_later_are_texts_of_their_own(
    template: str, config: PreTrainedConfig
) -> None:
    """Each is what the target reads and writes at that time."""
    rows, report = prepare([{"messages": MESSAGES}], config, template)
    answers = [answer for row in rows for answer in texts_that_count(row, template)]
    assert [answer.split("<")[0].strip() for answer in answers] == ["import os", "return self.path"]
    tokenizer = make_tokenizer(template)
    for row, end in zip(rows, (3, 5), strict=True):
        assert row["input_ids"] == tokenizer.apply_chat_template(MESSAGES[:end], return_dict=True)["input_ids"]
    assert (report.num_texts, report.problems) == (2, {})


def test_what_the_target_wrote_is_learned_as_it_is(config: PreTrainedConfig) -> None:
    """Its tokens are not encoded again, and turns that begin with the ones before them are one text."""
    tokenizer = make_tokenizer()
    first = tokenizer(CALL := "<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    answer = [*tokenizer("import")["input_ids"], *tokenizer(" o")["input_ids"], *tokenizer("s")["input_ids"]]
    assert tokenizer("import os")["input_ids"] != answer
    second = first + answer + tokenizer("<|im_end|>\n" + CALL)["input_ids"]
    messages = [*MESSAGES[1:4], {"role": "assistant", "content": "import os"}]
    turns = [{"prompt_ids": prompt, "answer_ids": answer} for prompt in (first, second)]
    row = {"messages": messages, "generations": turns}
    rows, _ = prepare([row, row | {"generations": [*reversed(turns)]}], config)
    assert [row["input_ids"] for row in rows] == [second + answer] * 2 + [first + answer]
    assert texts_that_count(rows[0]) == ["import os", "import os"]
    foreign = {"messages": [*MESSAGES[:4], {"role": "assistant", "content": "def"}]}
    with pytest.raises(ValueError, match="its tokens are another tokenizer's"):
        prepare([row | foreign], config)


TOOLS = [{"type": "function", "function": {"name": "list_paths", "parameters": {}}}]


@pytest.mark.parametrize("form", ["values", "json", "functions"])
def test_tools_documents_and_calls_reach_the_template(form: str, config: PreTrainedConfig) -> None:
    template = (
        "{% if tools %}tools {{ tools | tojson }}\n{% endif %}{% for d in documents or [] %}{{ d.text }}\n{% endfor %}"
        "{% for m in messages %}{{ m.role }}:\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{% for name, value in c.function.arguments.items() %}({{ name }}={{ value }})"
        "{% endfor %}{% endfor %}<|endoftext|>{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    arguments, as_json = {"path": "a.py"}, form != "values"
    function = {"name": "list_paths", "arguments": json.dumps(arguments) if as_json else arguments}
    calls = {"function_call": function} if form == "functions" else {"tool_calls": [{"function": function}]}
    messages = [MESSAGES[1], {"role": "assistant", "content": None} | calls]
    messages += [{"role": "tool", "content": "a.py"}, {"role": "assistant", "content": "import os"}]
    columns = {"tools": TOOLS, "documents": [{"text": "a page"}]}
    if form == "functions":
        columns |= {"tools": None, "functions": [tool["function"] for tool in TOOLS]}
    columns = {name: json.dumps(value) if as_json and value else value for name, value in columns.items()}
    rows, _ = prepare([{"messages": messages} | columns], config, template)
    text = make_tokenizer().decode(rows[0]["input_ids"])
    assert text.startswith('tools [{"type": "function", "function": {"name": "list_paths"')
    assert "\na page\nuser:\nimport what?" in text
    assert texts_that_count(rows[0]) == ["list_paths(path=a.py)<|endoftext|>", "import os<|endoftext|>"]
    of_run = {"tools": TOOLS, "documents": [{"text": "a page"}]}  # instead of the row
    tokenizer, again = make_tokenizer(template), Dataset.from_list([{"messages": messages}])
    for name, value in of_run.items():  # one after the other
        tokenizer = with_template_kwargs(tokenizer, {name: value})
    again, _ = prepare_dataset(again, tokenizer, config, max_length=256, packing=False)
    assert again[0]["input_ids"] == rows[0]["input_ids"]


@pytest.mark.parametrize("shown", ["m.content", "m.content | trim", "'' + m.content", "m.content.strip()"])
def test_a_null_content_is_an_empty_text_and_a_template_without_tools_is_named_once(
    shown: str, config: PreTrainedConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenAI writes null beside calls. Many templates would write "None" for it, or fail."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ SHOWN }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% endfor %}<|endoftext|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    calls = [{"function": {"name": "list_paths", "arguments": "{}"}}]
    messages = [MESSAGES[1], {"role": "assistant", "content": None, "tool_calls": calls}]
    messages += [{"role": "tool", "content": "a.py"}, {"role": "assistant", "content": "import os"}]
    rows, _ = prepare([{"messages": messages, "tools": TOOLS}], config, template.replace("SHOWN", shown))
    assert texts_that_count(rows[0]) == ["list_paths<|endoftext|>", "import os<|endoftext|>"]
    assert caplog.text.count("The chat template ignores `tools`") == 1


def test_empty_lists_of_tools_and_calls_are_none(config: PreTrainedConfig) -> None:
    """As tables fill them in. Llama 3.1's template takes any list for a call, and any for tools."""
    template = "{% if tools is not none %}tools{% endif %}" + CHATML.replace(
        "message.content", "'call' if 'tool_calls' in message else message.content"
    )
    messages = [message | {"tool_calls": []} for message in MESSAGES]
    rows, _ = prepare([{"messages": messages, "tools": "[]", "documents": []}], config, template)
    assert rows[0]["input_ids"] == prepare([{"messages": MESSAGES}], config)[0][0]["input_ids"]


@pytest.mark.parametrize("number", [1, 2])
def test_leading_answers_are_left_out_and_counted(number: int, config: PreTrainedConfig) -> None:
    (row,), report = prepare([{"messages": MESSAGES[2:3] * number + MESSAGES[3:]}], config)
    assert row["input_ids"] == make_tokenizer().apply_chat_template(MESSAGES[3:], return_dict=True)["input_ids"]
    assert report.num_dropped == 1
    assert "1 conversations begin with an answer" in str(report)


def test_held_out_rows_are_like_all_rows_and_depend_on_their_number_alone() -> None:
    held_out = held_out_numbers(10_000, 500, seed=0)
    assert len({*held_out}) == 500
    assert 4700 < sum(held_out) / 500 < 5300  # in a file that is sorted by length, of all lengths
    assert held_out_numbers(10_000, 0.05, seed=0) == held_out != held_out_numbers(10_000, 500, seed=1)
    assert len(held_out_numbers(100, 128, seed=0)) == 10
    rows = Dataset.from_list([{"text": str(number)} for number in range(100)])
    trained, held = split_rows(rows, 128, seed=0)
    assert sorted([*trained["text"], *held["text"]], key=int) == rows["text"]


def test_the_data_is_looked_at_before_anything_is_written() -> None:
    """Duplicates, and what cannot be answered, are left out with a count and the first example."""
    rows = [{"prompt": text} for text in ("What is it?", "what is  it", "Who? ", "long " * 60, "2+3?", "2-3?")]
    usable, report = usable_rows(read_prompts_of([*rows, {"prompt": None}]), 64)
    asked = [json.loads(row)["messages"][0]["content"] for row in usable["conversation"]]
    assert asked == ["What is it?", "Who? ", "2+3?", "2-3?"]
    lengths = [min(len(ids) + 30, 64) for ids in usable["prompt_ids"]]
    assert size_of_prompts(usable, 30, 64) == (4, sum(lengths))
    (turns,), _ = usable_rows(read_prompts_of([{"messages": MESSAGES}]), 256)
    num_said = len(turns["prompt_ids"]) + len(make_tokenizer()(MESSAGES[3]["content"])["input_ids"])
    assert size_of_prompts(Dataset.from_list([turns]), 30, 256).num_tokens == num_said + 2 * 30
    assert report.startswith("4 of 7 rows can be used, with 4 answers to write after")
    assert "left out 1 (the first is row 1): is a duplicate" in report
    assert "left out 1 (the first is row 3): its first prompt leaves no room" in report
    with pytest.raises(ValueError, match=r"No row of the dataset can be used:(?s:.*)has none of"):
        usable_rows(read_prompts_of([{"prompt": None, "text": ""}]), 64)


def read_prompts_of(rows: list[dict[str, Any]]) -> Dataset:
    return preparation.read_prompts(Dataset.from_list(rows), make_tokenizer())


def test_columns_of_the_user_may_have_any_name(config: PreTrainedConfig) -> None:
    row = {"prompt": "Who?", "completion": "os"}
    (usual,), _ = prepare([row], config)
    others = {"contents": "c", "prompt_ids": [1], "key": "k", "row": 7}
    (found,), _ = prepare([row | others], config)
    assert found["input_ids"] == usual["input_ids"]


def test_what_is_learned_of_the_same_words_identifies_them(config: PreTrainedConfig) -> None:
    rows = [{"messages": MESSAGES}, {"prompt": MESSAGES[:-1], "completion": MESSAGES[-1:]}]
    texts = [read_texts(Dataset.from_list([row]), make_tokenizer(), config, 256)[0] for row in rows]
    assert texts[0]["input_ids"] == texts[1]["input_ids"]
    assert texts[0]["loss_mask"] != texts[1]["loss_mask"]
    assert texts[0]["contents"] != texts[1]["contents"]


def test_rows_with_answers_are_read_once(config: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without duplicates and with what a user says first; the windows of a text are held out together."""
    long = {"text": "import os, re, sys\n" * 60}
    rows = [{"text": f"import {n}\n"} for n in range(40)] + [long, {"prompt": "Who?", "completion": "os"}, long]
    data = Dataset.from_list([{"text": None, "prompt": None, "completion": None} | row for row in rows])
    texts, report = usable_rows(read_texts(data, make_tokenizer(), config, 32), 32)
    assert report.startswith("42 of 43 rows can be used, with 42 answers")
    asked = [question for question in texts["question"] if question]
    assert asked == ["".join(row.get("prompt", row.get("text", "")))[:200] for row in rows[:-1]]
    monkeypatch.setattr(preparation, "read_row", None)
    for seed in range(9):
        trained, held_out = split_rows(texts, 4, seed)
        assert len({*held_out["row"]}) == 4
        assert {*held_out["row"]} | {*trained["row"]} == {*range(42)}
        assert not {*held_out["row"]} & {*trained["row"]}
    prepared, _ = prepare_dataset(trained, make_tokenizer(), config, max_length=32, packing=False)
    assert [*prepared["input_ids"]] == [*trained["input_ids"]]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, "The dataset is empty"),
        ([{"question": "x"}], {}, "has none of `messages`.*only 'question'"),
        ([{"messages": MESSAGES}], {"template": None}, "has no chat template"),
        ([{"text": "x"}], {"max_length": 5000}, "at most the target's 4096 positions, got 5000"),
        (
            [{"messages": MESSAGES}],
            {"template": {"rag": CHATML}},
            "left out 1.*multiple chat templates with no default",
        ),
    ],
)
def test_unusable_data_is_refused(
    rows: list[dict[str, Any]], settings: dict[str, Any], message: str, config: PreTrainedConfig
) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        prepare(rows, config, **settings)


def test_batches_are_padded_on_the_right() -> None:
    rows = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "position_ids": [0, 1, 0], "hidden_states": torch.ones(3, 2)},
        {"input_ids": [8], "loss_mask": [1], "position_ids": [0], "hidden_states": torch.ones(1, 2)},
    ]
    batch = GumihoDataCollator()(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]
    # Padding is a text of its own.
    assert batch["position_ids"].tolist() == [[0, 1, 0], [0, 0, 1]]
    assert batch["hidden_states"].sum(dim=-1).tolist() == [[2, 2, 2], [2, 0, 0]]
    assert GumihoDataCollator()([{"input_ids": [1, 2]}])["loss_mask"].tolist() == [[1, 1]]


@pytest.mark.parametrize(
    "marks",
    [
        {"labels": [-100, -100, 7, 8, -100, 1]}, {"assistant_masks": [0, 0, 1, 1, 0, 1]},
        {"completion_mask": [False, False, True, True, False, True]}, {"loss_mask": [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]},
        {"loss_mask": [False, False, True, False, False, False], "labels": [1, 1, 1, 1, 1, 1]},
    ],
)  # fmt: skip
def test_what_counts_is_read_however_it_is_marked(marks: dict[str, list[Any]]) -> None:
    """A state counts where its token and the next one are the assistant's; the next text of a packed row is none."""
    row = {"input_ids": [5, 6, 7, 8, 9, 1], "position_ids": [0, 1, 2, 3, 4, 5]} | marks
    assert GumihoDataCollator()([row])["loss_mask"].tolist() == [[0, 0, 1, 0, 0, 0]]
    if "labels" in marks and "loss_mask" not in marks:
        packed = {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1], "labels": [5, 6, 7, 8]}
        assert GumihoDataCollator()([packed])["loss_mask"].tolist() == [[1, 0, 1, 0]]


def test_packed_rows_and_others_share_a_batch() -> None:
    packed = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 0, 1], "position_ids": [0, 1, 0, 1]}
    alone = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}
    for rows in ([packed, alone], [alone, packed]):
        batch = GumihoDataCollator()(rows)
        assert batch["position_ids"].tolist() == [[0, 1, 0, 1] if row is packed else [0, 1, 2, 0] for row in rows]
        table = Dataset.from_list([row | {"position_ids": row.get("position_ids")} for row in rows])
        assert GumihoDataCollator()([*table])["position_ids"].equal(batch["position_ids"]), (
            "a table holds no value there"
        )
        everything = collate_all(GumihoDataCollator(), rows)
        assert everything["loss_mask"].tolist() == [[1, 0, 1, 0] if row is packed else [1, 1, 0, 0] for row in rows]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, r"holds only \['messages'\]. Prepare conversations with"),
        ({"input_ids": [3, 4], "loss_mask": [1]}, "has 2 tokens, but its `loss_mask` is for 1"),
        ({"input_ids": [3, 10]}, "holds the token 10, but target and drafter know 10 tokens"),
        ({"input_ids": [1] * 6}, "has 6 tokens, but target and drafter have positions for 5"),
        ({"input_ids": [3, -1]}, "holds the token -1, but target and drafter know 10 tokens"),
        ({"input_ids": []}, "A row holds no tokens"),
        ({"input_ids": [3, 4, 0], "attention_mask": [1, 1, 0]}, "A row is padded: .* Tokenize without padding"),
        ({"input_ids": [3, 4], "loss_mask": [1, 0.5]}, r"holds 0\.5. Give 1 for states that count, 0 for all"),
        ({"input_ids": [3, 4], "labels": [-100]}, "has 2 tokens, but its `labels` is for 1"),
    ],
)
def test_unfit_rows_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GumihoDataCollator(vocab_size=10, max_length=5)([row])


def test_a_tokenizer_without_special_tokens_to_look_at_is_refused(
    config: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mistral-common's is, which has no template to render either."""

    def unknown(_: Any) -> None:
        raise NotImplementedError

    tokenizer = make_tokenizer()
    monkeypatch.setattr(PreTrainedTokenizerFast, "added_tokens_decoder", property(unknown))
    with pytest.raises(ValueError, match=r"does not say which of its tokens are special\. Load the target's"):
        prepare_dataset(Dataset.from_list([{"text": "import os"}]), tokenizer, config, max_length=64)


def test_a_foreign_tokenizer_is_refused(config: PreTrainedConfig) -> None:
    with pytest.raises(ValueError, match="holds tokens that the target does not have"):
        prepare([{"text": "import os, re"}], AutoConfig.from_pretrained(DEMO_TARGET, vocab_size=100))


@pytest.mark.parametrize("form", ["NFKC", "NFC"])
@pytest.mark.parametrize(
    "answer", ["import os\u2026\nso on\u2026", "the \ufb01rst has 5\u338f", "cafe\u0301 nai\u0308ve"]
)
def test_a_normalizer_of_the_tokenizer_changes_nothing_of_what_counts(form: str, answer: str) -> None:
    """It makes texts longer, or shorter."""
    tokenizer = make_tokenizer(CHATML)
    normalizer = getattr(normalizers, form)()
    tokenizer.backend_tokenizer.normalizer = normalizer
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512)
    data = Dataset.from_list(
        [{"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": answer}]}]
    )
    rows, _ = prepare_dataset(data, tokenizer, config, packing=False, max_length=256)
    learned = [place for place, counts in enumerate(rows[0]["loss_mask"]) if counts]
    text = tokenizer.decode(rows[0]["input_ids"][learned[0] : learned[-1] + 1])
    assert text == normalizer.normalize_str(answer) + "<|im_end|>"


@pytest.mark.parametrize(
    "marks",
    [
        {"seq_lengths": [3, 2]},
        {"attention_mask": [1, 1, 1, 2, 2]},
        {"seq_idx": [0, 0, 0, 1, 1]},
        {"document_ids": [4, 4, 4, 7, 7]},
    ],
)
def test_texts_that_other_libraries_packed_stay_apart(marks: dict[str, list[int]]) -> None:
    row = {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9]}
    batch = GumihoDataCollator()([row | marks])
    expected = GumihoDataCollator()([row | {"position_ids": [0, 1, 2, 0, 1]}])
    assert all(torch.equal(batch[name], expected[name]) for name in expected)
    assert "position_ids" not in GumihoDataCollator()([row | {"attention_mask": [1] * 5}])
    with pytest.raises(ValueError, match="`seq_lengths` are"):
        GumihoDataCollator()([row | {"seq_lengths": [3, 3]}])
