"""Training data without data: the target writes its own users' prompts, and answers them."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...internals import dataset_fingerprint
from ...resumable_file import append_rows, check_begun_with, cut_unfinished_batch, sole_writer
from ...user_errors import UserValueError
from ...verification.fingerprint import model_fingerprint
from ..conversations import Conversation, MalformedRowError, read_text
from ..fingerprint import tokenizer_fingerprints
from ..preparation import check_settings
from ..regeneration import regenerate_dataset
from .endpoint import Endpoint, EndpointWriter
from .prompt_file import PromptFile, count_in_words
from .settings import SynthesisSettings
from .user_turn import find_user_turn
from .writing import Text, write_user_turns


def synthesize_dataset(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output_file: str | Path,
    settings: SynthesisSettings,
    *,
    openings: Sequence[str] = (),
) -> None:
    """
    Writes a dataset of conversations as JSONL: the target samples prompts after its chat template's opening of a user
    turn (Magpie), and then answers them. Useless and near-duplicate prompts are dropped; the file beside it,
    `*.prompts.jsonl`, says which and why.

    Stopped, it continues after the last complete batch in the files when it is called again; the result is the same.

    Args:
        target: The target.
        tokenizer: The target's, with a chat template.
        output_file: The new dataset: `messages`, whether the answer is `sampled`, whether it `ended` before the limit,
            and where its text does not encode back to them, the tokens (`written`), which training then reads.
        settings: What is written.
        openings: First words of users, which take turns. By default the target finds these, too.

    Raises:
        UserTurnNotFoundError: The chat template does not show where a user speaks.
        ValueError: The tokenizer does not belong to the target, or the file was begun with other settings.
        OSError: The disk is full, or another run writes there. What was written stays.
    """
    longest = max((len(tokenizer(words, add_special_tokens=False)["input_ids"]) for words in openings), default=0)
    room = longest + settings.max_prompt_tokens + settings.max_new_tokens
    check_settings(tokenizer, target.config, room)
    if not settings.num_prompts:
        raise UserValueError("There is nothing to answer. Give `num_prompts` above 0.")
    write = partial(write_user_turns, target.eval(), tokenizer, settings.max_prompt_tokens, settings.sampling)
    fingerprints = {"target": model_fingerprint(target)} | tokenizer_fingerprints(tokenizer)
    rows = _write_prompts(write, tokenizer, Path(output_file), settings, openings, fingerprints)
    positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    regenerate_dataset(
        Dataset.from_list(rows),
        target,
        tokenizer,
        output_file,
        batch_size=settings.batch_size,
        max_length=positions or 2 * room,
        seed=settings.seed,
        sampling=settings.sampling,
        max_new_tokens=settings.max_new_tokens,
    )


def synthesize_from_endpoint(
    endpoint: Endpoint,
    tokenizer: PreTrainedTokenizerBase,
    output_file: str | Path,
    settings: SynthesisSettings,
    *,
    openings: Sequence[str] = (),
    questions: Dataset | None = None,
) -> None:
    """
    Does what [`synthesize_dataset`] does with a target behind a server. Invalid responses are counted and left out.
    Called again after it or the server was stopped, it continues after the last complete batch.

    Args:
        endpoint: The server.
        tokenizer: The target's, with a chat template.
        output_file: The new dataset.
        settings: What is written. The batch size should be several times the concurrency.
        openings: First words of users, which take turns.
        questions: Rows in any of the forms of [`read_text`]; their first questions are answered.

    Raises:
        EndpointError: The server does not answer, refuses, or sends invalid responses only. What was written stays.
        UserTurnNotFoundError: The chat template does not show where a user speaks.
        ValueError: The file was begun with other settings, or there is nothing to answer.
        OSError: The disk is full, or another run writes there. What was written stays.
    """
    if not settings.num_prompts and questions is None:
        raise UserValueError("There is nothing to answer. Give `num_prompts` above 0, or `questions`.")
    path = Path(output_file)
    writer = EndpointWriter(endpoint, tokenizer, settings)
    fingerprints = {"target": endpoint.model} | tokenizer_fingerprints(tokenizer)
    rows: list[Mapping[str, Any]] = [*questions] if questions is not None else []
    if settings.num_prompts:
        rows += _write_prompts(writer.write_user_turns, tokenizer, path, settings, openings, fingerprints)
    asked = {"rows": dataset_fingerprint(Dataset.from_list([dict(row) for row in rows]))}
    with sole_writer(path):
        check_begun_with(path, fingerprints | asked | asdict(settings))
        done, problems = cut_unfinished_batch(path, settings.batch_size), Counter[str]()
        with tqdm(desc="server answers", total=len(rows), initial=done, unit="row") as progress:
            for start in range(done, len(rows), settings.batch_size):
                batch = list(map(_question_of, rows[start : start + settings.batch_size]))
                answers = _answer(writer, batch, settings, start)
                append_rows(path, answers)
                problems.update(answer["skipped"] for answer in answers if "skipped" in answer)
                progress.update(len(batch))
    tqdm.write(f"{len(rows)} rows. Left out: {count_in_words(problems)}.")


def _write_prompts(
    write: Callable[[Sequence[str], int], list[Text]],
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    settings: SynthesisSettings,
    openings: Sequence[str],
    fingerprints: dict[str, str],
) -> list[dict[str, Any]]:
    """Returns `num_prompts` rows of `messages`, which it writes beside `path` where they are missing."""
    find_user_turn(tokenizer)
    names = ("batch_size", "max_prompt_tokens", "temperature", "top_p", "seed")
    begun_with: dict[str, Any] = fingerprints | {name: getattr(settings, name) for name in names}
    begun_with |= {"openings": list(openings) or None}
    path = path.with_name(path.name.removesuffix(".jsonl") + ".prompts.jsonl")
    with sole_writer(path):
        check_begun_with(path, begun_with)
        special = list(tokenizer.all_special_tokens)
        file = PromptFile(path, write, openings or [""], special, settings.batch_size, settings.seed)
        file.grow(settings.num_prompts)
    tqdm.write(f"{settings.num_prompts} prompts. Dropped: {count_in_words(file.dropped)}.")
    return file.rows[: settings.num_prompts]


def _question_of(row: Mapping[str, Any]) -> list[dict[str, str]] | str:
    """Returns the messages up to the first answer, or why there are none."""
    try:
        example = read_text(row, has_template=True, answered=False)
    except MalformedRowError as error:
        return str(error)
    if not isinstance(example, Conversation):
        return "is a text, and a server answers conversations"
    roles = [message["role"] for message in example.messages]
    return example.messages[: roles.index("assistant")]


def _answer(
    writer: EndpointWriter, batch: list[list[dict[str, str]] | str], settings: SynthesisSettings, start: int
) -> list[dict[str, Any]]:
    """Returns the rows of a batch, those that cannot be answered with the reason."""
    asked = {index: question for index, question in enumerate(batch) if not isinstance(question, str)}
    sampled = [random.Random(f"{settings.seed} {start + index}").random() < settings.sampled_share for index in asked]
    rows: list[dict[str, Any]] = [{"skipped": question} for question in batch]
    texts = writer.answer(list(asked.values()), sampled, settings.seed + start)
    for (index, messages), is_sampled, text in zip(asked.items(), sampled, texts, strict=True):
        answer = {"role": "assistant", "content": text.text}
        row = {"messages": [*messages, answer], "sampled": is_sampled, "ended": text.ended}
        rows[index] = {"skipped": text.problem} if text.problem else row
    return rows
