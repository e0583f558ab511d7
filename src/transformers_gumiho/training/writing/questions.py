"""Training data without data: the target writes its users' questions, too (Magpie)."""

import math
import random
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ...commands import UserValueError
from ..data.datasets import MalformedRowError
from ..data.fingerprint import tokenizer_fingerprints
from ..data.open_text import with_template_kwargs
from ..data.preparation import normalized
from ..data.rendering import MARK, Renderer
from .requests import Request, Sampling, Task
from .row_file import Engine, in_words, row_file


_NUM_TOGETHER = 256  # questions that are asked of a server at a time
_NUM_TRIED = 10  # batches after which it shows whether a target writes questions
_MIN_CHARACTERS = 8
# A text of repetitions is a fifth of its size when compressed; prose is a half.
_MAX_COMPRESSION = 5.0
_COMPRESSED_FROM = 100


class UserTurnNotFoundError(UserValueError):
    """A chat template under which a target cannot be asked for a user's turn."""


def find_user_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Returns what the chat template writes before and after a first user turn, or raises `UserTurnNotFoundError`."""
    way_out = "template with a user opening (`--chat_template FILE`), or questions (`--data FILE`)."
    how = "has no chat template. Give a"
    if tokenizer.chat_template:
        try:
            text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
            opening, *rest = text.split(MARK)
            if len(rest) == 1 and opening.strip():
                return opening, rest[0].strip()
            shown = "writes nothing before it" if len(rest) == 1 else f"shows it {len(rest)} times"
            how = f"does not show where the user speaks: its chat template {shown}. Give another"
        except jinja2.TemplateError as error:
            how = f"has a chat template that refuses a user's turn: {error}. Give another"
    raise UserTurnNotFoundError(f"The tokenizer {tokenizer.name_or_path!r} {how} {way_out}")


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
    Stopped, it continues when it is called again. Several processes share the work, as in [`regenerate_dataset`].

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
        ValueError: Hardly any question is useful. Other errors are those of [`regenerate_dataset`].
    """
    if num_prompts < 1 or max_prompt_tokens < 1:
        raise UserValueError(f"There must be at least 1 prompt of 1 token, got {num_prompts} of {max_prompt_tokens}.")
    tokenizer = with_template_kwargs(tokenizer, chat_template_kwargs)
    sampling, openings, useful = sampling or Sampling(), list(openings) or [""], list[str]()
    made_from = engine.made_from | {"openings": openings, "sampling": repr(sampling), "seed": seed}
    made_from |= tokenizer_fingerprints(tokenizer) | {"max_prompt_tokens": max_prompt_tokens}
    turn, renderer = find_user_turn(tokenizer), Renderer(tokenizer)
    ask = partial(_ask, renderer, turn, openings, max_prompt_tokens, sampling, seed)
    together, num_written = engine.batch_size or _NUM_TOGETHER, 0
    with row_file(output_file, made_from) as file:
        while len(useful) < num_prompts:
            # No more than are needed if all are useful: so the file is the same wherever a run was stopped.
            num_batches = math.ceil((num_prompts - len(useful)) / together)
            num_batches = num_batches if num_written else min(num_batches, _NUM_TRIED)
            numbers = range(num_written, num_written + num_batches * together)
            file.write(numbers, ask, engine, "target asks")
            num_written = numbers.stop
            rows = list(file.rows())
            first: dict[str, dict[str, Any]] = {}
            for row in [row for row in rows[:num_written] if "dropped" not in row]:
                if first.setdefault(normalized(row["prompt"]), row) is not row:
                    row["dropped"] = "a duplicate"
            useful = [row["prompt"] for row in first.values()]
            dropped = in_words(row["dropped"] for row in rows[:num_written] if "dropped" in row)
            if num_written >= _NUM_TRIED * together and len(useful) < num_written / 100:
                raise UserValueError(
                    f"Of {num_written} prompts that the target wrote, {len(useful)} are of use. Dropped: {dropped}. "
                    f"Give questions (`--data FILE`) or first words (`--openings FILE`)."
                )
        file.finish(rows, f"{num_prompts} prompts. Dropped: {dropped}.")
    return Dataset.from_list([{"messages": [{"role": "user", "content": text}]} for text in useful[:num_prompts]])


def _ask(
    renderer: Renderer, turn: tuple[str, str], openings: list[str], max_tokens: int, sampling: Sampling, seed: int,
    number: int,
) -> Task:  # fmt: skip
    """Asks for what a user might say first; what it draws depends on its number alone."""
    tokenizer, (opening, closing) = renderer.tokenizer, turn
    first_words = openings[number % len(openings)]
    prompt = renderer.encode(opening + first_words)
    chance = random.Random(f"{seed} question {number}")
    # A user's turn ends with the tokenizer's end, or with a special token that begins the closing.
    ends = {*renderer.encode(closing)[:1]} & {*tokenizer.all_special_ids} | {tokenizer.eos_token_id}
    try:
        ids, ended = yield Request(
            prompt, max_tokens, sampling, chance.getrandbits(31), frozenset(ends - {None}), closing
        )
    except MalformedRowError as error:
        return {"prompt": "", "dropped": str(error)}
    text = first_words + renderer.continuation(prompt, ids[: -1 if ended else None])
    cut = (text.split(closing)[0] if closing else text).strip()
    reason = why_degenerate(cut, ended or cut != text.strip(), list(tokenizer.all_special_tokens))
    if first_words and cut == first_words.strip():
        reason = "nothing after its opening"
    return {"prompt": cut} | ({} if reason is None else {"dropped": reason})


def why_degenerate(text: str, ended: bool, special_tokens: list[str]) -> str | None:
    """Returns why a self-written prompt is useless, or `None`. Only templates write the `special_tokens`."""
    if not ended:
        return "does not end"
    if len(text) < _MIN_CHARACTERS or any(token in text for token in [*special_tokens, "\ufffd"]):
        return "too short or garbled"
    data = text.encode()
    repeats = len(data) >= _COMPRESSED_FROM and len(data) > _MAX_COMPRESSION * len(zlib.compress(data))
    return "repeats itself" if repeats else None
