"""Letting the target answer itself: a drafter has to imitate what the target says, not what someone else said."""

import json
import random
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ...commands import UserValueError
from ..data.conversations import Example
from ..data.datasets import MalformedRowError
from ..data.fingerprint import conversations_fingerprint, tokenizer_fingerprints
from ..data.open_text import with_template_kwargs
from ..data.preparation import read_prompts
from ..data.rendering import Renderer
from .requests import Completion, Request, Sampling, Task
from .row_file import Engine, in_words, row_file


_MANY_CUT = 0.1  # of the answers: they are then mostly beginnings
# An answer that was cut while it repeated a phrase of at most so many tokens, over at least so many tokens, would do
# so forever.
_LONGEST_PHRASE, _LOOP_TOKENS = 64, 128


@dataclass(frozen=True)
class WritingSettings:
    """
    How a target answers: with at most `max_new_tokens` tokens, or `max_length` together with what is before.
    `sampling` says how they are chosen, by `seed`, in a share of rows. Of a raw text, it reads `num_prompt_tokens`.
    """

    max_length: int = 2048
    max_new_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    num_prompt_tokens: int = 64


def regenerate_dataset(
    dataset: Dataset,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    output_file: str | Path,
    settings: WritingSettings | None = None,
    *,
    chat_template_kwargs: dict[str, Any] | None = None,
    made_from: dict[str, Any] | None = None,
) -> None:
    """
    Writes the dataset again as JSONL, with every assistant turn replaced by what the target says there: after its own
    earlier answers, until it ends, at most `max_new_tokens` tokens, and `max_length` with its prompt. A question
    without an answer is answered, too. Of a raw text, the target continues the first `num_prompt_tokens`, or the
    prompt where there is one.

    A line holds the number of its `row`, the `messages` (or `prompt` and `completion`, or `text`) for people, and the
    `generations` as token ids for training. A row that cannot be answered becomes a line with the reason (`skipped`).

    Stopped, it continues when it is called again. Started with `accelerate launch`, each process writes a share of the
    batches, and the first one puts them together; behind a server, the first one writes alone.

    Args:
        dataset: Rows in any of the forms of [`read_row`], or what [`read_prompts`] reads of them.
        engine: Runs the target: a [`LocalEngine`] or a [`ServerEngine`].
        tokenizer: The target's.
        output_file: The new dataset.
        settings: How the target answers.
        chat_template_kwargs: Arguments of the chat template, such as `{"enable_thinking": False}`.
        made_from: What identifies the answers, where that is known without looking at the rows and the loaded target.

    Raises:
        EndpointError: The server does not answer. What was written stays.
        ValueError: The dataset is a stream or empty, the file was begun with other settings, no row could be answered,
            or what the target computes is not finite.
        OSError: The disk is full, or another run writes there. What was written stays.
    """
    settings = settings or WritingSettings()
    tokenizer = with_template_kwargs(tokenizer, chat_template_kwargs)
    renderer = Renderer(tokenizer)
    prompts = read_prompts(dataset, tokenizer, settings.num_prompt_tokens)
    if made_from is None:
        made_from = {"rows": conversations_fingerprint(prompts.select_columns("conversation"))} | engine.made_from
        made_from |= tokenizer_fingerprints(tokenizer) | asdict(settings)

    def begin(number: int) -> Task:
        return write_row(number, prompts[number], renderer, settings)

    with row_file(output_file, made_from) as file:
        # Those with long prompts first, so that like ones are answered together.
        lengths = [len(ids or ()) for ids in prompts["prompt_ids"]]
        longest_first = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        file.write(longest_first, begin, engine, "target answers")
        report, num_answers = _report(file.rows(), settings)
        file.finish(file.rows(), report)
    if not num_answers:
        raise UserValueError(f"No row could be answered: {report}")


def _report(rows: Iterable[dict[str, Any]], settings: WritingSettings) -> tuple[str, int]:
    num_rows, num_answers, reasons, cut = 0, 0, list[str](), Counter[str]()
    for row in rows:
        num_rows += 1
        reasons += [row[name] for name in ("skipped", "left_out") if name in row]
        for turn in row.get("generations", []):
            num_answers += 1
            if not turn["ended"]:
                is_long = len(turn["answer_ids"]) >= settings.max_new_tokens
                cut["--max_new_tokens" if is_long else "--max_length"] += 1
    report = f"{num_rows:,} rows with {num_answers:,} answers. Left out: {in_words(reasons)}."
    if cut.total() > _MANY_CUT * num_answers:
        ((option, _),) = cut.most_common(1)
        report += f" {cut.total() / num_answers:.0%} of the answers were cut at a limit: raise `{option}`."
    return report, num_answers


def write_row(number: int, row: Mapping[str, Any], renderer: Renderer, settings: WritingSettings) -> Task:
    """Asks for what belongs into a row; what it draws depends on the row's number alone."""
    if row["problem"]:
        return {"skipped": row["problem"]}
    chance = random.Random(f"{settings.seed} {number}")
    sampling = settings.sampling if chance.random() < settings.sampling.share else None
    generations: list[dict[str, Any]] = []
    written: dict[str, Any] = {}
    example = Example(**json.loads(row["conversation"]))
    prompt = row["prompt_ids"]
    history = example.messages[: example.turns[0]]
    try:
        for turn, following in zip(example.turns, [*example.turns[1:], None], strict=True):
            if generations:  # what it reads first is in the row
                prompt = renderer.prompt(history, example.extras)
            text, generation = yield from _ask(prompt, renderer, settings, sampling, chance.getrandbits(31))
            generations.append(generation)
            history = [*history, {"role": "assistant", "content": text}]
            written["messages"] = history
            history = history + example.messages[turn + 1 : following]
    except MalformedRowError as error:
        if not generations:
            return {"skipped": str(error)}
        written["left_out"] = str(error)  # the turns from here on
    if example.text == "completion":
        written = {"prompt": history[0]["content"], "completion": text}
    elif example.text:  # decoded as one, as the prompt may end within a character
        new = generation["answer_ids"][: -1 if generation["ended"] else None]
        written = {"text": renderer.decode([*prompt, *new]).removeprefix(renderer.tokenizer.bos_token or "")}
    columns = {name: value for name, value in example.extras.items() if name in ("tools", "documents")}
    if others := {name: value for name, value in example.extras.items() if name not in columns}:
        columns["chat_template_kwargs"] = others
    ended = {"sampled": sampling is not None, "ended": generations[-1]["ended"]}
    return written | columns | {"generations": generations} | ended


def _ask(
    prompt: list[int], renderer: Renderer, settings: WritingSettings, sampling: Sampling | None, seed: int
) -> Generator[Request, Completion, tuple[str, dict[str, Any]]]:
    """Returns the text of what the target writes after a prompt, and its tokens, or raises `MalformedRowError`."""
    if not prompt:
        raise MalformedRowError("its prompt holds no tokens")
    room = settings.max_length - len(prompt)
    if room < 1:
        raise MalformedRowError("there is no room for an answer within the maximum length")
    ids, ended = yield Request(prompt, min(settings.max_new_tokens, room), sampling, seed)
    if not ended and loops(ids):
        raise MalformedRowError("the answer ends in a loop")
    text = renderer.continuation(prompt, ids[: -1 if ended else None])
    if not text:
        raise MalformedRowError("the target says nothing")
    return text, {"prompt_ids": prompt, "answer_ids": ids, "ended": ended}


def loops(ids: list[int]) -> bool:
    """Whether tokens end in a phrase that is said again and again."""
    tail = ids[-_LOOP_TOKENS:]
    phrases = range(1, _LONGEST_PHRASE + 1)
    return len(tail) == _LOOP_TOKENS and any(tail[size:] == tail[:-size] for size in phrases)
