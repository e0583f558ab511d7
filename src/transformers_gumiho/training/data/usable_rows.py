"""Which rows of a dataset can be used, and which of these are held out: decided before anything is written."""

import hashlib
import random
import re
from typing import Any

from datasets import Dataset, Features, Value
from transformers import PreTrainedTokenizerBase

from ...open_text import encode_open_text
from ...user_errors import UserValueError
from .conversations import Conversation, LeftOut, MalformedRowError, RawText, read_row
from .preparation import check_form
from .rendering import Renderer
from .sources import JSON_LINE


_FORMAT = 1  # part of what `datasets` keeps results under: raise it whenever the same rows are looked at differently
_LOOKS = Features(
    dict.fromkeys(("problem", "key"), Value("string"))
    | dict.fromkeys(("answers", "tokens", "drops_answer"), Value("int64"))
)
# What may differ between two texts that say the same.
_INDIFFERENT = re.compile(r"[\s.,;:!?\"']+")


def normalized(text: str) -> str:
    """Returns a text without the differences of case, spaces and punctuation."""
    return _INDIFFERENT.sub(" ", text.casefold()).strip()


def usable_rows(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    answered: bool = False,
    max_new_tokens: int | None = None,
    num_proc: int | None = None,
) -> tuple[Dataset, str]:
    """
    Returns the rows that a target can answer, or if they are `answered`, those that have an answer, without
    duplicates; and a report with the reasons of the others.

    Raises:
        ValueError: The dataset is a stream, empty or of no known form, or no row can be used.
    """
    check_form(dataset, answered)
    looks = dataset.map(
        _look,
        batched=True,
        batch_size=100,
        remove_columns=dataset.column_names,
        features=_LOOKS,
        fn_kwargs={
            "tokenizer": tokenizer, "max_length": max_length, "answered": answered, "format_version": _FORMAT,
        },
        num_proc=num_proc,
        desc="reading the data",
    )  # fmt: skip
    left_out, seen, kept = LeftOut(), set[str](), []
    num_answers = num_tokens = num_dropped = 0
    for number, row in enumerate(looks):
        if row["problem"] or row["key"] in seen:
            left_out.add(row["problem"] or "is a duplicate", number)
        elif row["key"]:  # a blank line is no row
            seen.add(row["key"])
            kept.append(number)
            num_answers += row["answers"]
            num_tokens += row["tokens"]
            num_dropped += row["drops_answer"]
    report = f"{len(kept):,} of {len(dataset):,} rows can be used, with {num_answers:,} answers"
    if not answered:
        report += f" to write after {num_tokens:,} tokens of first prompts"
    if max_new_tokens:
        report += f": about {num_answers * max_new_tokens // 2:,} tokens, if they have half of {max_new_tokens} each"
    if num_dropped:
        report += f"\n  {num_dropped:,} conversations begin with an answer, which is left out"
    report = "\n".join([report, *left_out.lines()])
    if not kept:
        raise UserValueError(f"No row of the dataset can be used:\n{report}")
    return dataset.select(kept), report


def held_out_numbers(num_rows: int, num_eval_rows: float, seed: int) -> list[int]:
    """
    Returns the rows to hold out of `num_rows`, in random order: `num_eval_rows`, at most a tenth, or if below 1, this
    share. They depend on nothing else, so a row is held out whatever happens to others.
    """
    share = num_eval_rows * num_rows if num_eval_rows < 1 else min(num_eval_rows, num_rows // 10)
    return random.Random(seed).sample(range(num_rows), int(share))


def split_rows(rows: Dataset, num_eval_rows: float, seed: int) -> tuple[Dataset, Dataset | None]:
    """Returns the rows to train on, and those to hold out ([`held_out_numbers`]), `None` where these are none."""
    held_out = held_out_numbers(len(rows), num_eval_rows, seed)
    trained = sorted({*range(len(rows))} - {*held_out})
    return rows.select(trained), rows.select(held_out) if held_out else None


def _look(
    batch: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    answered: bool,
    format_version: int,
) -> dict[str, list[Any]]:
    renderer, looks = Renderer(tokenizer), []
    for values in zip(*batch.values(), strict=True):
        row = dict(zip(batch, values, strict=True))
        look: dict[str, Any] = {"problem": "", "key": "", "answers": 1, "tokens": 0, "drops_answer": 0}
        try:
            if str(row.get(JSON_LINE, "{}")).strip():
                look |= _look_at(read_row(row, bool(tokenizer.chat_template), answered), renderer, answered)
        except MalformedRowError as error:
            look["problem"] = str(error)
        if not answered and look["tokens"] >= max_length:
            look["problem"] = f"its first prompt leaves no room for an answer within {max_length} tokens"
        looks.append(look)
    return {name: [look[name] for look in looks] for name in _LOOKS}


def _look_at(example: Conversation | RawText, renderer: Renderer, answered: bool) -> dict[str, Any]:
    if isinstance(example, RawText):
        words = [example.prompt, example.completion if answered or not example.prompt else ""]
        return {"key": _key(words), "tokens": len(encode_open_text(renderer.tokenizer, example.prompt))}
    is_answer = [message["role"] == "assistant" for message in example.messages]
    read = [m for m, is_own in zip(example.messages, is_answer, strict=True) if answered or not is_own]
    look = {"key": _key([*read, example.extras]), "answers": sum(is_answer[example.first_trained :])}
    if not answered:
        first = is_answer.index(True, example.first_trained)
        look["tokens"] = len(renderer.prompt(example.messages[:first], example.extras))
    return look | {"drops_answer": int(example.drops_answer)}


def _key(words: list[Any]) -> str:
    """Returns what two rows share that say the same."""
    return hashlib.sha256(normalized(" ".join(map(str, words))).encode()).hexdigest()
