"""Training data without data: the target writes its users' questions, too (Magpie)."""

import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ...resumable_file import append_rows, check_begun_with, complete_lines, cut_after, sole_writer
from ...user_errors import UserValueError
from ..data.conversations import MalformedRowError
from ..data.rendering import Renderer, with_template_kwargs
from ..data.usable_rows import normalized
from ..fingerprint import tokenizer_fingerprints
from .answer_file import count_in_words, processes
from .requests import Engine, Request, Sampling, Task


_MARK = "9b1f6c-the-user-speaks-here-4e02"  # what no template writes by itself
_NUM_TOGETHER = 256  # questions that are asked of a server at a time
_MIN_CHARACTERS = 8
# A text of repetitions is a fifth of its size when compressed; prose is a half.
_MAX_COMPRESSION = 5.0
_COMPRESSED_FROM = 100
_MIN_LETTERS = 0.3
_RUN = re.compile(r"(.{1,20}?)\1{7,}", re.DOTALL)


class UserTurnNotFoundError(UserValueError):
    """A chat template under which a target cannot be asked for a user's turn."""


def find_user_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Returns what the chat template writes before and after a first user turn, or raises `UserTurnNotFoundError`."""
    name = tokenizer.name_or_path
    way_out = "template with a user opening (`--chat_template FILE`), or questions (`--data FILE`)."
    if not tokenizer.chat_template:
        raise UserTurnNotFoundError(f"The tokenizer {name!r} has no chat template. Give a {way_out}")
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    except jinja2.TemplateError as error:
        message = f"The chat template of {name!r} refuses a user's turn: {error}. Give another {way_out}"
        raise UserTurnNotFoundError(message) from error
    opening, *rest = text.split(_MARK)
    if len(rest) != 1 or not opening.strip():
        how = "writes nothing before it" if len(rest) == 1 else f"shows it {len(rest)} times"
        raise UserTurnNotFoundError(
            f"The chat template of {name!r} does not show where the user speaks: it {how}. Give a {way_out}"
        )
    return opening, rest[0].strip()


def synthesize_dataset(
    num_prompts: int,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    output_file: str | Path,
    *,
    openings: Sequence[str] = (),
    max_prompt_tokens: int = 256,
    sampling: Sampling | None = None,
    seed: int = 0,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Dataset:
    """
    Returns questions: the target samples what a user says after its chat template's opening of a user turn (Magpie,
    arXiv 2406.08464). They are written as JSONL, with those that are dropped, because they are useless or duplicates.
    Of several processes, the first one writes. Stopped, it continues when it is called again.

    Args:
        num_prompts: Number of useful questions to write.
        engine: Runs the target: a [`LocalEngine`] or a [`ServerEngine`].
        tokenizer: The target's, with a chat template.
        output_file: The file of the questions.
        openings: First words of users, which take turns. By default the target finds these, too.
        max_prompt_tokens: Tokens of a question after its first words, at most; a longer one is dropped.
        sampling: How they are sampled.
        seed: For sampling.
        chat_template_kwargs: Arguments of the chat template.

    Raises:
        UserTurnNotFoundError: The chat template does not show where a user speaks.
        ValueError: The file was begun with other settings, or hardly any question is useful.
        EndpointError: The server does not answer. What was written stays.
        OSError: The disk is full, or another run writes there. What was written stays.
    """
    if num_prompts < 1 or max_prompt_tokens < 1:
        raise UserValueError(f"There must be at least 1 prompt of 1 token, got {num_prompts} of {max_prompt_tokens}.")
    state, path = processes(), Path(output_file)
    sampling, tokenizer = sampling or Sampling(), with_template_kwargs(tokenizer, chat_template_kwargs)
    writer = _QuestionWriter(
        tokenizer, *find_user_turn(tokenizer), list(openings) or [""], max_prompt_tokens, sampling, seed
    )
    if state.is_main_process:
        begun_with: dict[str, Any] = {
            "target": engine.fingerprint,
            "openings": writer.openings,
            "sampling": repr(sampling),
        }
        begun_with |= tokenizer_fingerprints(tokenizer) | {"max_prompt_tokens": max_prompt_tokens, "seed": seed}
        with sole_writer(path):
            check_begun_with(path, begun_with)
            _grow(path, writer, engine, num_prompts)
    state.wait_for_everyone()
    rows = [row for row in map(json.loads, complete_lines(path)) if "dropped" not in row]
    return Dataset.from_list(
        [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in rows[:num_prompts]]
    )


def _grow(path: Path, writer: "_QuestionWriter", engine: Engine, num_prompts: int) -> None:
    """Writes until the file holds as many useful questions. Raises `ValueError` if hardly any is useful."""
    together = engine.batch_size or _NUM_TOGETHER
    lines = complete_lines(path)
    cut_after(path, len(lines) - len(lines) % together)
    rows = [json.loads(line) for line in complete_lines(path)]
    seen = {normalized(row["prompt"]) for row in rows if "dropped" not in row}
    dropped = Counter(row["dropped"] for row in rows if "dropped" in row)
    num_written = len(rows)
    with tqdm(desc="target asks", total=num_prompts, initial=min(len(seen), num_prompts), unit="prompt") as progress:
        while len(seen) < num_prompts:
            numbers = range(num_written, num_written + together)
            found = dict(engine.run(((n, writer.write(n)) for n in numbers), is_proven=num_written > 0))
            for row in map(found.__getitem__, numbers):
                key = normalized(row["prompt"])
                if "dropped" not in row and key in seen:
                    row["dropped"] = "a duplicate"
                if "dropped" in row:
                    dropped[row["dropped"]] += 1
                else:
                    seen.add(key)
            append_rows(path, map(found.__getitem__, numbers))
            num_written += together
            progress.update(min(len(seen), num_prompts) - progress.n)
            if num_written >= 10 * together and len(seen) < num_written / 100:
                raise UserValueError(
                    f"Of {num_written} prompts that the target wrote, {len(seen)} are of use. Dropped: "
                    f"{count_in_words(dropped)}. Give questions (`--data FILE`) or first words (`--openings FILE`)."
                )
    tqdm.write(f"{num_prompts} prompts. Dropped: {count_in_words(dropped)}.")


@dataclass
class _QuestionWriter:
    tokenizer: PreTrainedTokenizerBase
    opening: str
    closing: str
    openings: list[str]
    max_tokens: int
    sampling: Sampling
    seed: int

    def __post_init__(self) -> None:
        renderer = Renderer(self.tokenizer)
        self.decode, self.special = renderer.decode, list(self.tokenizer.all_special_tokens)
        # A user's turn ends with the tokenizer's end, or with a special token that begins the closing.
        closing = self.tokenizer(self.closing, add_special_tokens=False)["input_ids"][:1]
        self.ends = frozenset({*closing} & {*self.tokenizer.all_special_ids})
        self.ends |= {self.tokenizer.eos_token_id} - {None}

    def write(self, number: int) -> Task:
        """Asks for what a user might say first; what it draws depends on its number alone."""
        first_words = self.openings[number % len(self.openings)]
        prompt = list(self.tokenizer(self.opening + first_words, add_special_tokens=False)["input_ids"])
        seed = random.Random(f"{self.seed} question {number}").getrandbits(31)
        try:
            ids, ended = yield Request(prompt, self.max_tokens, self.sampling, seed, self.ends, self.closing)
        except MalformedRowError as error:
            return {"prompt": "", "dropped": str(error)}
        # Where it follows first words, it is decoded with them: alone it may lack a space in front.
        before = prompt if first_words else []
        said = self.decode(before + ids[: -1 if ended else None])[len(self.decode(before)) :]
        text = first_words + said
        cut = (text.split(self.closing)[0] if self.closing else text).strip()
        reason = why_degenerate(cut, ended or cut != text.strip(), self.special)
        if first_words and cut == first_words.strip():
            reason = "nothing after its opening"
        return {"prompt": cut} | ({} if reason is None else {"dropped": reason})


def why_degenerate(text: str, ended: bool, special_tokens: list[str]) -> str | None:
    """Returns why a self-written prompt is useless, or `None`. Only templates write the `special_tokens`."""
    if not ended:
        return "does not end"
    if len(text) < _MIN_CHARACTERS:
        return "too short"
    if "�" in text or any(token in text for token in special_tokens):
        return "garbled"
    if sum(map(str.isalpha, text)) < _MIN_LETTERS * len(text):
        return "hardly any letters"
    data = text.encode()
    repeats = len(data) >= _COMPRESSED_FROM and len(data) > _MAX_COMPRESSION * len(zlib.compress(data))
    return "repeats itself" if repeats or _RUN.search(text) else None
