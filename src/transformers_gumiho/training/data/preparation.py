"""From a dataset of conversations to the rows that a drafter is trained on."""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from datasets import Dataset, Features, Sequence, Value
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...commands import UserValueError
from .conversations import read_row
from .datasets import JSON_LINE, MalformedRowError, full_cache_named
from .open_text import with_template_kwargs
from .rendering import Renderer, counting_states


# Part of what `datasets` keeps results under: raise it whenever the same rows are to be read or packed differently.
_FORMAT = 9
_ROWS: dict[str, Any] = {"input_ids": Sequence(Value("int32")), "loss_mask": Sequence(Value("int8"))}
_PACKED = _ROWS | {"position_ids": _ROWS["input_ids"]}
_COUNTS = ("num_tokens", "num_loss_tokens", "num_truncated", "num_dropped")
# Of a row that the target answers: what it reads first, the conversation as JSON, and the tokens of all questions.
_PROMPT: dict[str, Any] = {"prompt_ids": Sequence(Value("int32")), "conversation": Value("string")}
_PROMPT |= {"key": Value("string")} | dict.fromkeys(("num_answers", "num_tokens", "num_dropped"), Value("int64"))
# Of a text that is learned: besides its tokens, a fingerprint of its row, and what a user says first in it.
_TEXT = _ROWS | dict.fromkeys(("key", "contents", "question"), Value("string"))
_TEXT |= dict.fromkeys((*_COUNTS, "num_answers"), Value("int64"))
# Texts that are packed together come from as many at a time.
_PACKING_BATCH = 1000
# What may differ between two texts that say the same.
_INDIFFERENT = re.compile(r"[\s.,;:!?\"']+")


@dataclass
class PreparationReport:
    """
    What became of a dataset: the numbers of the rows that are left out, by reason (`problems`); `num_texts` texts, of
    which each window of a long raw text is one, with `num_tokens` tokens, of which the loss counts `num_loss_tokens`;
    `num_truncated` texts that were cut at the maximum length; `num_dropped` answers that began a row, and were left
    out; `num_rows` rows after packing.
    """

    problems: dict[str, list[int]] = field(default_factory=dict)
    num_texts: int = 0
    num_tokens: int = 0
    num_loss_tokens: int = 0
    num_truncated: int = 0
    num_dropped: int = 0
    num_rows: int = 0

    def __str__(self) -> str:
        return (
            f"{self.num_texts:,} texts with {self.num_tokens:,} tokens ({self.num_loss_tokens:,} of them count) in "
            f"{self.num_rows} rows; {self.num_truncated:,} texts truncated; "
            f"{sum(map(len, self.problems.values())):,} left out{_left_out(self.problems, self.num_dropped)}"
        )


def prepare_dataset(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    target_config: PreTrainedConfig,
    *,
    max_length: int = 2048,
    packing: bool = True,
    num_proc: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> tuple[Dataset, PreparationReport]:
    """
    Encodes conversations and texts, and packs them into rows. Where the target wrote a row, its tokens are taken as
    they are. Other conversations are rendered with the target's chat template.

    Args:
        dataset: Rows in any of the forms of [`read_row`].
        tokenizer: The target's.
        target_config: The target's.
        max_length: Longest row in tokens. A longer conversation is truncated, a longer raw text cut into windows.
        packing: Put several texts into a row, each with positions of its own, so that next to no padding is computed.
            Without it, train with `train_sampling_strategy="group_by_length"`.
        num_proc: Processes to encode with.
        chat_template_kwargs: Arguments of the chat template, such as `{"enable_thinking": False}`.

    Returns:
        Rows of `input_ids`, `loss_mask` (1 at the states that count as targets: those of assistant tokens that another
        assistant token follows) and, packed, `position_ids`; and what became of the dataset. Malformed rows, those in
        which the template hides which tokens are the assistant's, and those with tokens that the target does not have
        are skipped and counted.

    Raises:
        ValueError: `max_length` exceeds the target's positions, the dataset is empty, a stream or of no known form, or
            no row of it can be used.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from transformers import AutoConfig, AutoTokenizer
    >>> from transformers_gumiho.training import prepare_dataset

    >>> tokenizer = AutoTokenizer.from_pretrained("examples/demo_pair/target")
    >>> config = AutoConfig.from_pretrained("examples/demo_pair/target")
    >>> texts = Dataset.from_dict({"text": ["import os", "import json"]})
    >>> rows, report = prepare_dataset(texts, tokenizer, config, max_length=32)
    >>> len(rows), rows.column_names  # both texts are packed into one row
    (1, ['input_ids', 'loss_mask', 'position_ids'])

    ```
    """
    config = target_config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    if max_length < 2 or (positions and max_length > positions):
        raise UserValueError(
            f"`max_length` must be at least 2 and at most the target's {positions} positions, got {max_length}."
        )
    found = read_texts(dataset, with_template_kwargs(tokenizer, chat_template_kwargs), config, max_length, num_proc)
    places, problems = _sorted_out(found)
    rows = found.select(places)
    counts = {name: sum(rows[name]) for name in _COUNTS}
    report = PreparationReport(problems, len(rows), **counts, num_rows=len(rows))
    if not len(rows):
        raise UserValueError(f"No row of the dataset can be used:\n{report}")
    rows = rows.select_columns(list(_ROWS))
    if packing:
        settings = {"max_length": max_length, "format_version": _FORMAT}
        rows = rows.map(
            _pack_batch, batched=True, batch_size=_PACKING_BATCH, features=Features(_PACKED), fn_kwargs=settings,
            desc="packing",
        )  # fmt: skip
        report.num_rows = len(rows)
    return rows, report


def read_texts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    target_config: PreTrainedConfig,
    max_length: int,
    num_proc: int | None = None,
) -> Dataset:
    """
    Reads rows that have answers: the texts of each with their tokens, cut at the maximum length, and the `problem` of
    one that cannot be used. They may be selected from before [`prepare_dataset`] packs them.
    """
    if _was_read(dataset, _TEXT):
        return dataset
    settings = {"max_length": max_length, "vocab_size": target_config.get_text_config(decoder=True).vocab_size}
    return _read_rows(dataset, _encode, _TEXT, tokenizer, num_proc, **settings)


def read_prompts(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, num_prompt_tokens: int = 64, num_proc: int | None = None
) -> Dataset:
    """
    Reads rows that a target is to answer, and renders what it reads first: once, whatever uses them afterwards.

    Args:
        dataset: Rows in any of the forms of [`read_row`].
        tokenizer: The target's.
        num_prompt_tokens: Of a raw text, the tokens that the target continues.
        num_proc: Processes to read with.

    Returns:
        For each row its `prompt_ids`, its `conversation` as JSON (an [`Example`]), the number of its answers, the
        tokens of its questions, a `key` that duplicates share, and the `problem` for which it cannot be answered.

    Raises:
        ValueError: The dataset is a stream or empty.
    """
    if _was_read(dataset, _PROMPT):
        return dataset
    return _read_rows(dataset, _prompt, _PROMPT, tokenizer, num_proc, num_prompt_tokens=num_prompt_tokens)


def usable_rows(found: Dataset, max_length: int) -> tuple[Dataset, str]:
    """
    Returns what [`read_prompts`] or [`read_texts`] found in the rows that can be used, without duplicates, and a
    report that has the reasons. Raises `ValueError` where no row can be used.
    """
    places, problems = _sorted_out(found)
    keys, numbers = list(found["key"]), list(found["row"])
    first: dict[str, int] = {}
    kept: list[int] = []
    num_rows = len({*numbers})
    has_prompts = "prompt_ids" in found.column_names
    lengths = [len(ids or ()) for ids in found["prompt_ids"]] if has_prompts else [0] * len(keys)
    for place in places:
        if lengths[place] >= max_length:
            reason = f"its first prompt leaves no room for an answer within {max_length} tokens"
            problems.setdefault(reason, []).append(numbers[place])
        elif first.setdefault(keys[place], numbers[place]) != numbers[place]:
            problems.setdefault("is a duplicate", []).append(numbers[place])
        else:
            kept.append(place)
    found = found.select(kept)
    report = f"{len(first):,} of {num_rows:,} rows can be used, with {sum(found['num_answers']):,} answers"
    if has_prompts:
        report += f" to write after {sum(map(len, found['prompt_ids'])):,} tokens of first prompts"
    report += _left_out(problems, sum(found["num_dropped"]))
    if not kept:
        raise UserValueError(f"No row of the dataset can be used:\n{report}")
    return found, report


class DataSize(NamedTuple):
    """The rows that a drafter is trained on, and their tokens."""

    num_rows: int
    num_tokens: int


def size_of_prompts(prompts: Dataset, tokens_per_answer: float, max_length: int) -> DataSize:
    """Returns the size of the conversations that prompts of [`read_prompts`] become, with answers of this length."""
    pairs = zip(prompts["num_tokens"], prompts["num_answers"], strict=True)
    lengths = [min(int(num_tokens + turns * tokens_per_answer), max_length) for num_tokens, turns in pairs]
    return DataSize(len(lengths), sum(lengths))


def plain_rows(dataset: Dataset) -> Dataset:
    """
    Returns a dataset whose rows are Python's objects, whatever format it has; a transformed one stays transformed.
    Raises `ValueError` for a stream and for an empty dataset.
    """
    if not isinstance(dataset, Dataset):
        raise UserValueError(
            f"The dataset must be a `datasets.Dataset`, got {type(dataset).__name__}. Load it at once."
        )
    if not len(dataset):
        raise UserValueError("The dataset is empty. Check its name and split.")
    return dataset if dataset.format["type"] == "custom" else dataset.with_format(None)


def held_out_numbers(num_rows: int, num_eval_rows: float, seed: int) -> list[int]:
    """
    Returns the rows to hold out of `num_rows`, in random order: `num_eval_rows`, at most a tenth, or if below 1, this
    share. They depend on nothing else, so a row is held out whatever happens to others.
    """
    share = num_eval_rows * num_rows if num_eval_rows < 1 else min(num_eval_rows, num_rows // 10)
    return random.Random(seed).sample(range(num_rows), int(share))


def split_rows(rows: Dataset, num_eval_rows: float, seed: int) -> tuple[Dataset, Dataset | None]:
    """
    Returns the rows to train on, and those to hold out ([`held_out_numbers`]), `None` where these are none. Texts of
    one row stay together.
    """
    places: dict[int, list[int]] = {}
    for place, number in enumerate(rows["row"] if _was_read(rows, _TEXT) else range(len(rows))):
        places.setdefault(number, []).append(place)
    by_row = [*places.values()]
    held_out = held_out_numbers(len(by_row), num_eval_rows, seed)
    trained = sorted({*range(len(by_row))} - {*held_out})

    def select(chosen: list[int]) -> Dataset:
        return rows.select([place for row in chosen for place in by_row[row]])

    return select(trained), select(held_out) if held_out else None


def normalized(text: str) -> str:
    """Returns a text without the differences of case, spaces and punctuation."""
    return _INDIFFERENT.sub(" ", text.casefold()).strip()


def _was_read(dataset: Any, columns: dict[str, Any]) -> bool:
    return {"row", *columns} <= {*(getattr(dataset, "column_names", None) or ())}


def _left_out(problems: dict[str, list[int]], num_dropped: int) -> str:
    lines = [f"  {num_dropped:,} conversations begin with an answer, which is left out"] if num_dropped else []
    for problem, rows in sorted(problems.items(), key=lambda item: -len(item[1])):
        lines.append(f"  left out {len(rows):,} (the first is row {rows[0]}): {problem}")
    return "".join(f"\n{line}" for line in lines)


def _read_rows(
    dataset: Dataset,
    read: Callable[..., Iterator[dict[str, Any]]],
    columns: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    num_proc: int | None = None,
    **settings: Any,
) -> Dataset:
    """
    Returns what `read` makes of each row, next to the number of the `row`, and the `problem` of one that cannot be
    used.
    """
    dataset = plain_rows(dataset)
    Renderer(tokenizer)  # refuses a tokenizer that it cannot read
    features = Features(columns | {"row": Value("int64"), "problem": Value("string")})
    settings |= {"read": read, "tokenizer": tokenizer, "names": [*features], "format_version": _FORMAT}
    with full_cache_named():
        found = dataset.map(
            _read_batch, with_indices=True, batched=True, batch_size=100, remove_columns=dataset.column_names,
            features=features, fn_kwargs=settings, num_proc=num_proc, desc="reading the data",
        )  # fmt: skip
    return found.with_format(None)


def _sorted_out(found: Dataset) -> tuple[list[int], dict[str, list[int]]]:
    """Returns the places of rows without a problem, and the numbers of the others by their problem."""
    places, problems = list[int](), dict[str, list[int]]()
    for place, (number, problem) in enumerate(zip(found["row"], found["problem"], strict=True)):
        if problem:
            problems.setdefault(problem, []).append(number)
        else:
            places.append(place)
    return places, problems


def _read_batch(
    batch: dict[str, list[Any]],
    numbers: list[int],
    read: Callable[..., Iterator[dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    names: list[str],
    format_version: int,
    **settings: Any,
) -> dict[str, list[Any]]:
    renderer = Renderer(tokenizer)
    found: list[dict[str, Any]] = []
    for number, *values in zip(numbers, *batch.values(), strict=True):
        row = dict(zip(batch, values, strict=True))
        if not str(row.get(JSON_LINE, "{}")).strip():
            continue  # a blank line is no row
        try:
            found += [{"row": number, "problem": ""} | new for new in read(row, renderer, **settings)]
        except MalformedRowError as error:
            found.append({"row": number, "problem": str(error)})
    return {name: [row.get(name) for row in found] for name in names}


def _prompt(row: dict[str, Any], renderer: Renderer, num_prompt_tokens: int) -> Iterator[dict[str, Any]]:
    example = read_row(row, bool(renderer.tokenizer.chat_template), answered=False)
    first, *_ = example.turns
    ids = renderer.prompt(example.messages[:first], example.extras, bool(example.text))
    if example.text == "text":
        ids = ids[:num_prompt_tokens]
    questions = [message for message in example.messages if message["role"] != "assistant"]
    later = [message["content"] or "" for message in example.messages[first:] if message["role"] != "assistant"]
    num_tokens = len(ids) + sum(len(renderer.encode(text)) for text in later)
    conversation = json.dumps(asdict(replace(example, generations=[])), ensure_ascii=False, default=str)
    yield {
        "prompt_ids": ids, "conversation": conversation, "num_tokens": num_tokens,
        "key": _hash(normalized(f"{questions} {example.extras}")),
        "num_answers": len(example.turns), "num_dropped": example.drops_answer,
    }  # fmt: skip


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _encode(row: dict[str, Any], renderer: Renderer, max_length: int, vocab_size: int) -> Iterator[dict[str, Any]]:
    """Yields the texts of a row, each cut at the maximum length, or into windows of it."""
    example = read_row(row, bool(renderer.tokenizer.chat_template))
    texts = renderer.texts(example)
    if any(token >= vocab_size for ids, _ in texts for token in ids):
        raise MalformedRowError("holds tokens that the target does not have. Use the target's own tokenizer")
    key = _hash(normalized(f"{example.messages} {example.extras}"))
    of_row = {"key": key, "contents": _hash(str(example))}
    of_first = {
        "num_dropped": int(example.drops_answer),
        "num_answers": len(example.turns),
        "question": example.question,
    }
    for ids, learned in texts:
        counts = counting_states(ids, learned, renderer.tokenizer.eos_token_id)
        is_cut = len(ids) > max_length and example.text != "text"
        for start in range(0, max_length if is_cut else max(len(ids), 1), max_length):
            some = ids[start : start + max_length]
            mask = counts[start : start + max_length]
            if any(mask[1:]):
                yield of_row | of_first | {
                    "input_ids": some, "loss_mask": mask, "num_tokens": len(some), "num_loss_tokens": sum(mask),
                    "num_truncated": is_cut,
                }  # fmt: skip
                of_first = {"num_dropped": 0, "num_answers": 0, "question": ""}
            elif not start:  # or else it is the end of a long text, too short to learn from
                yield {"problem": "no token to learn within the maximum length"}


def _pack_batch(batch: dict[str, list[list[int]]], max_length: int, format_version: int) -> dict[str, list[list[int]]]:
    """Packs texts first-fit, the longest first, which leaves few gaps."""
    rows: list[dict[str, list[int]]] = []
    texts = zip(batch["input_ids"], batch["loss_mask"], strict=True)
    for ids, mask in sorted(texts, key=lambda text: -len(text[0])):
        row = next((row for row in rows if len(row["input_ids"]) + len(ids) <= max_length), None)
        if row is None:
            row = {name: [] for name in _PACKED}
            rows.append(row)
        row["input_ids"] += ids
        row["loss_mask"] += mask
        row["position_ids"] += range(len(ids))
    return {name: [row[name] for row in rows] for name in _PACKED}
