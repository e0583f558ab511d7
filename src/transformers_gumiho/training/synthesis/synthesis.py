"""Training data without data: the target writes its own users' prompts, and answers them."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...internals import dataset_fingerprint
from ...resumable_file import append_rows, check_begun_with, cut_unfinished_batch, sole_writer
from ...target.fingerprint import model_fingerprint
from ..conversations import Conversation, MalformedRowError, read_text
from ..fingerprint import tokenizer_fingerprints
from ..preparation import check_settings
from ..regeneration import regenerate_dataset
from ..sampling import Sampling
from .endpoint import Endpoint, EndpointWriter
from .prompt_file import PromptFile, count_in_words
from .user_turn import find_user_turn
from .writing import Text, write_user_turns


# Rows of so many batches are sorted by length: a batch has little padding, and every part of the file all lengths.
_SORTED_BATCHES = 8


@dataclass(frozen=True)
class SynthesisSettings:
    """
    What is written, and how.

    Attributes:
        num_prompts: Prompts that the target writes.
        batch_size: Prompts or answers that are written at a time.
        max_prompt_tokens: Tokens of a self-written prompt after its opening, at most; a longer one is dropped.
        max_new_tokens: Tokens of an answer, at most; a longer one is cut.
        sampled_share: Share of the answers that are sampled; the others are greedy.
        temperature: For prompts and sampled answers.
        top_p: Probability mass of the nucleus.
        seed: For sampling.
    """

    num_prompts: int
    batch_size: int = 32
    max_prompt_tokens: int = 256
    max_new_tokens: int = 512
    sampled_share: float = 0.25
    temperature: float = 1.0
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.num_prompts < 0:
            raise ValueError(f"`num_prompts` must be at least 0, got {self.num_prompts}.")
        if not 0 <= self.sampled_share <= 1:
            raise ValueError(f"`sampled_share` must be between 0 and 1, got {self.sampled_share}.")
        if self.temperature <= 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"`temperature` must be above 0 and `top_p` in (0, 1], got {self.temperature} and {self.top_p}."
            )

    @property
    def sampling(self) -> Sampling:
        """How prompts are sampled, and the sampled share of the answers."""
        return Sampling(self.temperature, self.top_p, self.sampled_share)


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

    Called again after it was stopped, it continues after the last whole batch in the files; the result is the same.

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
        raise ValueError("There is nothing to answer. Give `num_prompts` above 0.")
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
    Does what [`synthesize_dataset`] does with a target behind a server. Answers that the server gets wrong are counted
    and left out. Called again after it was stopped, or the server was, it continues after the last whole batch.

    Args:
        endpoint: The server.
        tokenizer: The target's, with a chat template.
        output_file: The new dataset.
        settings: What is written. A batch is waited for as a whole, so let it be several times the concurrency.
        openings: First words of users, which take turns.
        questions: Rows in any of the forms of [`read_text`]; their first questions are answered.

    Raises:
        EndpointError: The server does not answer, refuses, or sends invalid responses only. What was written stays.
        UserTurnNotFoundError: The chat template does not show where a user speaks.
        ValueError: The file was begun with other settings, or there is nothing to answer.
        OSError: The disk is full, or another run writes there. What was written stays.
    """
    if not settings.num_prompts and questions is None:
        raise ValueError("There is nothing to answer. Give `num_prompts` above 0, or `questions`.")
    path = Path(output_file)
    writer = EndpointWriter(
        endpoint, tokenizer, settings.max_prompt_tokens, settings.max_new_tokens, settings.sampling
    )
    fingerprints = {"target": endpoint.model} | tokenizer_fingerprints(tokenizer)
    rows: list[Mapping[str, Any]] = [*questions] if questions is not None else []
    if settings.num_prompts:
        write = writer.write_user_turns
        rows += _write_prompts(write, tokenizer, path, settings, openings, fingerprints)
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
    return _by_length(file.rows[: settings.num_prompts], _SORTED_BATCHES * settings.batch_size)


def _by_length(rows: list[dict[str, Any]], num_rows: int) -> list[dict[str, Any]]:
    parts = (rows[start : start + num_rows] for start in range(0, len(rows), num_rows))
    return [row for part in parts for row in sorted(part, key=lambda row: len(row["messages"][-1]["content"]))]


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
