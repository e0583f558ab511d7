"""Letting the target answer itself: a drafter has to imitate what the target says, not what someone else said."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..internals import dataset_fingerprint
from ..open_text import encode_open_text
from ..resumable_file import append_rows, check_begun_with, cut_unfinished_batch, sole_writer
from ..verification.fingerprint import model_fingerprint
from .conversations import Conversation, MalformedRowError, RawText, read_text
from .fingerprint import tokenizer_fingerprints
from .preparation import check_settings
from .rendering import decode, render_prompt
from .row_leaving import continue_rows
from .sampling import Sampling
from .written_rows import Turn, answer_text, written_row


# Batches whose rows are sorted by length together, so that every part of the file has all lengths. To 3,784 prompts of
# people, SmolLM2 wrote 55 tokens/s with equal lengths in a batch, and 26 with mixed ones: padding took the rest.
_SORTED_BATCHES = 8


def regenerate_dataset(
    dataset: Dataset,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output_file: str | Path,
    *,
    batch_size: int = 16,
    max_length: int = 2048,
    num_prompt_tokens: int = 64,
    max_new_tokens: int | None = None,
    seed: int = 0,
    sampling: Sampling | None = None,
) -> None:
    """
    Writes the dataset again as JSONL, with every assistant turn replaced by what the target says there: after its own
    earlier answers, until it ends or the longest text of the batch has `max_length` tokens. A question without an
    answer is answered, too. Of a raw text, the target continues the first `num_prompt_tokens`, or the prompt where
    there is one. A row whose text does not encode back to the tokens that the target wrote holds these, too, and
    training reads them. A row that cannot be answered becomes a line with the reason.

    Rows of similar length are answered together: within every 8 batches, the file's rows are in the order of their
    prompts' lengths. Stopped, it continues after the last complete batch in the file when it is called again; the
    result is the same.

    Args:
        dataset: Rows in any of the forms of [`read_row`].
        target: The target.
        tokenizer: The target's.
        output_file: The new dataset.
        batch_size: Conversations to answer at a time.
        max_length: Tokens of a text, at most.
        num_prompt_tokens: Tokens of a raw text that the target continues.
        max_new_tokens: Tokens of an answer, at most; by default only the text is limited.
        seed: For sampling.
        sampling: Where given, a share of the batches is sampled so, and each row says whether it was `sampled`.

    Raises:
        ValueError: The tokenizer does not belong to the target, `max_length` exceeds the
            target's positions, the file was begun with other settings, or what the target computes is not finite.
        OSError: The disk is full, or another run writes there. What was written stays.
    """
    check_settings(tokenizer, target.config, max_length)
    path = Path(output_file)
    with sole_writer(path):
        begun_with: dict[str, Any] = {"target": model_fingerprint(target)} | tokenizer_fingerprints(tokenizer)
        begun_with |= {"rows": dataset_fingerprint(dataset), "batch_size": batch_size, "max_length": max_length}
        begun_with |= {"num_prompt_tokens": num_prompt_tokens, "seed": seed, "max_new_tokens": max_new_tokens}
        begun_with["sorted_batches"] = _SORTED_BATCHES
        check_begun_with(path, begun_with | ({} if sampling is None else {"sampling": repr(sampling)}))
        done = cut_unfinished_batch(path, batch_size)
        dataset = _sorted_by_length(dataset, _SORTED_BATCHES * batch_size, bool(tokenizer.chat_template))
        writer = TargetWriter(target.eval(), tokenizer, max_length, num_prompt_tokens, max_new_tokens)
        begin = time.perf_counter()
        with tqdm(desc="target answers", total=len(dataset), initial=done, unit="row") as progress:
            for start in range(done, len(dataset), batch_size):
                torch.manual_seed(seed + start)
                if sampling is not None:
                    writer.sampling = sampling if sampling.samples(start // batch_size) else None
                batch = dataset.select(range(start, min(start + batch_size, len(dataset))))
                rows = writer.rewrite(list(batch))
                if sampling is not None:
                    rows = [row | {"sampled": writer.sampling is not None} for row in rows]
                append_rows(path, rows)
                progress.set_postfix_str(f"{writer.num_tokens / (time.perf_counter() - begin):.0f} tokens/s")
                progress.update(len(batch))


def _sorted_by_length(dataset: Dataset, window: int, has_template: bool) -> Dataset:
    """Returns the rows with each `window` of them sorted by the characters of their prompts."""
    lengths = [_prompt_length(row, has_template) for row in dataset]
    windows = (range(start, min(start + window, len(lengths))) for start in range(0, len(lengths), window))
    return dataset.select([row for rows in windows for row in sorted(rows, key=lengths.__getitem__)])


def _prompt_length(row: Mapping[str, Any], has_template: bool) -> int:
    try:
        example = read_text(row, has_template, answered=False)
    except MalformedRowError:
        return 0
    if isinstance(example, RawText):
        return len(example.prompt or example.completion)
    prompt = takewhile(lambda message: message["role"] != "assistant", example.messages)
    return sum(len(message["content"]) for message in prompt)


@dataclass
class TargetWriter:
    """Rewrites batches of rows; the fields are the arguments of [`regenerate_dataset`]."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    num_prompt_tokens: int
    max_new_tokens: int | None = None
    sampling: Sampling | None = None
    num_tokens: int = field(default=0, init=False)  # written so far

    def rewrite(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns each row as the target would have it."""
        examples = [self._read(row) for row in rows]
        texts = iter(self._continue_texts([example for example in examples if isinstance(example, RawText)]))
        answers = iter(self._answer([example for example in examples if isinstance(example, Conversation)]))
        return [
            example if isinstance(example, dict) else next(texts if isinstance(example, RawText) else answers)
            for example in examples
        ]

    def _read(self, row: Mapping[str, Any]) -> Conversation | RawText | dict[str, Any]:
        try:
            return read_text(row, has_template=bool(self.tokenizer.chat_template), answered=False)
        except MalformedRowError as error:
            return {"skipped": str(error)}

    def _continue_texts(self, examples: list[RawText]) -> list[dict[str, Any]]:
        prompts = []
        for example in examples:
            ids = encode_open_text(self.tokenizer, example.prompt or example.completion)
            room = self.max_length // 2
            prompts.append(ids[: room if example.prompt else min(self.num_prompt_tokens, room)])
        results = []
        for example, prompt, new in zip(examples, prompts, self._generate(prompts), strict=True):
            ended = self._has_ended(new)
            row = {"prompt": example.prompt, "completion": self.decode_after(prompt, new[: -1 if ended else None])}
            if not example.prompt:
                special = set(self.tokenizer.all_special_ids)
                begun = list(dropwhile(special.__contains__, prompt))  # without what the tokenizer puts before it
                row = {"text": answer_text(self.tokenizer, begun + new, ended)}
            results.append(written_row(self.tokenizer, row | {"ended": ended}, [(prompt, new)]))
        return results

    def decode_after(self, prompt: list[int], new: list[int]) -> str:
        """Returns the text of `new`; a tokenizer that drops the first space of a text does not drop this one."""
        return decode(self.tokenizer, prompt + new).removeprefix(decode(self.tokenizer, prompt))

    def _answer(self, conversations: list[Conversation]) -> list[dict[str, Any]]:
        histories = [list(c.messages[: c.first_trained]) for c in conversations]
        turns: list[list[Turn]] = [[] for _ in conversations]
        problems = ["no room for an answer" for _ in conversations]
        pending = set(range(len(conversations)))
        while pending:
            prompts = {}
            for index in sorted(pending):
                try:
                    prompt = self._next_prompt(conversations[index], histories[index])
                except MalformedRowError as error:
                    prompt, problems[index] = None, str(error)
                if prompt is None:
                    pending.discard(index)
                else:
                    prompts[index] = prompt
            for index, new in zip(prompts, self._generate(list(prompts.values())), strict=True):
                answer = answer_text(self.tokenizer, new, self._has_ended(new))
                histories[index].append({"role": "assistant", "content": answer})
                turns[index].append((prompts[index], new))
        rows: list[dict[str, Any]] = []
        for messages, written, problem in zip(histories, turns, problems, strict=True):
            if not written:
                rows.append({"skipped": problem})
                continue
            row = {"messages": messages, "ended": self._has_ended(written[-1][1])}
            rows.append(written_row(self.tokenizer, row, written))
        return rows

    def _next_prompt(self, conversation: Conversation, history: list[dict[str, str]]) -> list[int] | None:
        """Adds the messages up to the next answer to the history; returns the prompt, `None` without a next answer."""
        rest = conversation.messages[len(history) :]
        turn = next((index for index, message in enumerate(rest) if message["role"] == "assistant"), None)
        if turn is None:
            return None
        asked = history + rest[:turn]
        prompt = render_prompt(self.tokenizer, asked)
        if len(prompt) >= self.max_length:
            return None
        history[:] = asked
        return prompt

    def _generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Returns what the target says after each prompt, with its end, and without the padding that follows that."""
        if not prompts:
            return []
        room = self.max_length - max(map(len, prompts))
        limit = min(self.max_new_tokens or room, room)
        found = continue_rows(self.target, prompts, limit, self._ends, self.sampling)
        self.num_tokens += sum(map(len, found))
        return found

    @property
    def _ends(self) -> set[int]:
        ends = self.target.generation_config.eos_token_id
        return {*(ends if isinstance(ends, list) else [ends])} - {None}

    def _has_ended(self, tokens: list[int]) -> bool:
        return bool(tokens) and tokens[-1] in self._ends
