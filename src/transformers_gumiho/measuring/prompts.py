"""The prompts of a benchmark: questions of one or several turns, in categories."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..open_text import encode_open_text
from ..text_files import read_json_lines


DEFAULT_CATEGORY = "all"


@dataclass(frozen=True)
class Question:
    """
    What a user says, turn by turn.

    Attributes:
        name: Its id.
        category: What it is compared with.
        turns: The user's side of the conversation.
    """

    name: str
    category: str
    turns: tuple[str, ...]


def read_questions(
    name: str, *, column: str | None = None, split: str = "train", num_questions: int | None = None
) -> list[Question]:
    """
    Reads questions.

    Args:
        name: A JSONL file, or a dataset (a file, a folder or a name on the Hub; needs the `datasets` library). A row
            has `turns` (a list of texts, as MT-Bench and Spec-Bench write it), or `prompt` or `text`; and `category`
            and `question_id` where it likes.
        column: Take the text from this column.
        split: The split of a dataset.
        num_questions: Read this many. By default all.

    Raises:
        FileNotFoundError: `name` looks like a file, and there is none.
        ValueError: A row has none of these columns, there is no row, or the file is no JSONL in UTF-8.
    """
    path = Path(name)
    if path.suffix == ".jsonl":
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {name!r} to read prompts from. Give an existing one.")
        numbered = read_json_lines(path, num_questions)
        rows: Sequence[tuple[str, Mapping[str, Any]]] = [(f"Line {number}", row) for number, row in numbered]
    else:
        dataset = _load_dataset(path, name, split)
        chosen = dataset.select(range(min(num_questions or len(dataset), len(dataset))))
        rows = [(f"Row {index}", row) for index, row in enumerate(chosen)]
    if num_questions is not None and num_questions < 1:
        raise ValueError(f"At least one question has to be read, got {num_questions}.")
    if not rows:
        raise ValueError(f"{name!r} holds no questions. A line is JSON, with `turns`, `prompt` or `text`.")
    return [_read_question(row, index, f"{where} of {name!r}", column) for index, (where, row) in enumerate(rows)]


def first_of_each_category(questions: Sequence[Question], num_questions: int) -> list[Question]:
    """Returns the first `num_questions` of each category, in the order of `questions`."""
    seen: Counter[str] = Counter()
    chosen = []
    for question in questions:
        seen[question.category] += 1
        if seen[question.category] <= num_questions:
            chosen.append(question)
    return chosen


def _load_dataset(path: Path, name: str, split: str) -> Any:
    # Only those who measure with a dataset need the library.
    from datasets import load_dataset, load_from_disk

    if (kind := {".json": "json", ".parquet": "parquet"}.get(path.suffix)) is not None:
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {name!r} to read prompts from. Give an existing one.")
        return load_dataset(kind, data_files=name, split="train")
    if (path / "dataset_info.json").exists():
        return load_from_disk(name)
    return load_dataset(name, split=split)


def _read_question(row: Mapping[str, Any], index: int, where: str, column: str | None) -> Question:
    names = [column] if column is not None else ["turns", "prompt", "text"]
    found = next((row[name] for name in names if row.get(name)), None)
    if found is None:
        raise ValueError(f"{where} has the columns {sorted(row)}, and needs {' or '.join(map(repr, names))}.")
    turns = tuple(found) if isinstance(found, (list, tuple)) else (found,)
    if not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where} has turns that are not text: {turns!r}.")
    return Question(str(row.get("question_id", index)), str(row.get("category", DEFAULT_CATEGORY)), turns)


def encode_turn(tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
    """
    Returns the token ids of a conversation up to the turn after the last answer. Without a chat template the text is
    simply continued.
    """
    if not tokenizer.chat_template:
        text = "".join(turn + answer for turn, answer in zip(turns, [*answers, ""], strict=False))
        return encode_open_text(tokenizer, text)
    messages = []
    for turn, answer in zip(turns, [*answers, None], strict=False):
        messages.append({"role": "user", "content": turn})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def pad_left(prompts: Sequence[Sequence[int]], pad_token_id: int | None) -> dict[str, torch.Tensor]:
    """
    Returns prompts as one batch, `input_ids` and `attention_mask` `(B, T)`. Where there is no token for padding, any
    other one does: it is masked.
    """
    longest = max(map(len, prompts))
    rows = [[pad_token_id or 0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def padded_batches(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], size: int, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Returns prompts as batches of `size` rows, the last of what is left; see [`pad_left`]."""
    batches = []
    for start in range(0, len(prompts), size):
        padded = pad_left(prompts[start : start + size], tokenizer.pad_token_id)
        batches.append({name: tensor.to(device) for name, tensor in padded.items()})
    return batches
