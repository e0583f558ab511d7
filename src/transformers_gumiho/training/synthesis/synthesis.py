"""Training data without data: the target writes its own users' prompts, and answers them."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...resumable_file import append_rows, check_begun_with, cut_after, sole_writer, whole_lines
from ...target.fingerprint import model_fingerprint
from ..fingerprint import tokenizer_fingerprints
from ..preparation import check_settings
from ..written_rows import written_row
from .answer_features import AnswerFeatureCache
from .continuation import Sampling
from .endpoint import Endpoint, EndpointWriter
from .prompts import Prompt, PromptFile
from .target_writer import TargetWriter
from .user_turn import find_user_turn
from .writing import Request, Text, Writer


# Prompts are written and answered in rounds of so many batches: answers come early, of all lengths, and rows of a
# batch are of similar length.
_BATCHES_PER_ROUND = 8
# What prompts do not depend on.
_ONLY_FOR_ANSWERS = {"num_prompts", "max_new_tokens", "sampled_share", "questions", "feature_cache"}


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
        top_p: Mass that is sampled from.
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


def synthesize_dataset(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output_file: str | Path,
    settings: SynthesisSettings,
    *,
    system_prompts: Sequence[str] = (),
    openings: Sequence[str] = (),
    questions: Sequence[Prompt] = (),
    feature_cache: str | Path | None = None,
    features_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """
    Writes a dataset of conversations as JSONL: the target samples prompts after its chat template's opening of a user
    turn (Magpie), and answers them and the `questions`. Useless and near-duplicate prompts are dropped; the file
    beside it, `*.prompts.jsonl`, says which and why.

    Called again after it was stopped, it goes on after the last whole batch in the files; the result is the same.

    Args:
        target: The target.
        tokenizer: The target's, with a chat template.
        output_file: The new dataset: `messages`, whether the answer is `sampled`, whether it `ended` before the limit,
            and where its text does not encode back to them, the tokens (`written`), which training then reads.
        settings: What is written.
        system_prompts: System prompts, which take turns. By default, whatever the template says by itself.
        openings: First words of users, which take turns. By default the target finds these, too.
        questions: Prompts of the user's own, which are answered, too.
        feature_cache: Where given, a folder for the states that the target computes as it answers: a feature cache, as
            [`write_feature_cache`] makes it, of the tokens that were written.
        features_dtype: Of these states.

    Raises:
        UserTurnNotFoundError: The chat template does not show where a user speaks.
        ValueError: The tokenizer does not belong to the target, or the file was begun with other settings.
        OSError: The disk is full, or another run writes there. What was written stays.
    """
    longest = max((len(tokenizer(words, add_special_tokens=False)["input_ids"]) for words in openings), default=0)
    check_settings(tokenizer, target.config, longest + settings.max_prompt_tokens + settings.max_new_tokens)
    fingerprints = {"target": model_fingerprint(target)} | tokenizer_fingerprints(tokenizer)
    cache = AnswerFeatureCache(Path(feature_cache), features_dtype) if feature_cache is not None else None
    fingerprints["feature_cache"] = str(features_dtype) if cache else "none"
    writer = TargetWriter(
        target,
        tokenizer,
        settings.max_prompt_tokens,
        settings.max_new_tokens,
        Sampling(settings.temperature, settings.top_p),
        features_dtype if cache else None,
    )
    synthesis = Synthesis(
        writer, tokenizer, Path(output_file), settings, system_prompts, openings, questions, fingerprints, cache
    )
    with sole_writer(cache.folder) if cache else nullcontext():
        num_batches = synthesis.run()
        if cache:
            cache.finish(num_batches, target, tokenizer)


def synthesize_from_endpoint(
    endpoint: Endpoint,
    tokenizer: PreTrainedTokenizerBase,
    output_file: str | Path,
    settings: SynthesisSettings,
    *,
    system_prompts: Sequence[str] = (),
    openings: Sequence[str] = (),
    questions: Sequence[Prompt] = (),
) -> None:
    """
    Does what [`synthesize_dataset`] does with a target behind a server. Answers that the server gets wrong are counted
    and left out. Called again after it was stopped, or the server was, it goes on after the last whole batch.

    Args:
        endpoint: The server.
        tokenizer: The target's, with a chat template.
        output_file: The new dataset.
        settings: What is written. A batch is waited for as a whole, so let it be several times the concurrency.
        system_prompts: System prompts, which take turns.
        openings: First words of users, which take turns.
        questions: Prompts of the user's own.

    Raises:
        EndpointError: The server does not answer, refuses, or answers nonsense only. What was written stays.
        UserTurnNotFoundError: The chat template does not show where a user speaks.
        ValueError: The file was begun with other settings.
        OSError: The disk is full, or another run writes there. What was written stays.
    """
    fingerprints = {"target": endpoint.model} | tokenizer_fingerprints(tokenizer)
    sampling = Sampling(settings.temperature, settings.top_p)
    writer = EndpointWriter(endpoint, tokenizer, settings.max_prompt_tokens, settings.max_new_tokens, sampling)
    Synthesis(writer, tokenizer, Path(output_file), settings, system_prompts, openings, questions, fingerprints).run()


class Synthesis:
    """
    A dataset in the making; the arguments are those of [`synthesize_dataset`], with a writer for the target.

    Args:
        writer: Who writes prompts and answers.
        tokenizer: The target's.
        path: The new dataset.
        settings: What is written.
        system_prompts: System prompts.
        openings: First words of users.
        questions: Prompts of the user's own.
        fingerprints: Of what a file must have been begun with, besides the settings.
        cache: Where given, the answers' features go there.
    """

    def __init__(
        self,
        writer: Writer,
        tokenizer: PreTrainedTokenizerBase,
        path: Path,
        settings: SynthesisSettings,
        system_prompts: Sequence[str],
        openings: Sequence[str],
        questions: Sequence[Prompt],
        fingerprints: dict[str, str],
        cache: AnswerFeatureCache | None = None,
    ):
        if settings.num_prompts:
            for system in list[str | None](system_prompts) or [None]:
                find_user_turn(tokenizer, system)
        if openings and not settings.num_prompts:
            raise ValueError(
                "`openings` begin prompts that the target writes. Give `num_prompts` above 0, or no openings."
            )
        if not settings.num_prompts and not questions:
            raise ValueError("There is nothing to answer. Give `num_prompts` above 0, or `questions`.")
        self.begun_with: dict[str, Any] = fingerprints | asdict(settings)
        self.begun_with |= {"system_prompts": list(system_prompts), "questions": _digest(questions)}
        # None where there are none, as in files from before there were any.
        self.begun_with["openings"] = list(openings) or None
        self.writer, self.tokenizer, self.path, self.settings = writer, tokenizer, path, settings
        self.system_prompts, self.openings = list(system_prompts), list(openings)
        self.questions, self.cache = list(questions), cache
        self.problems: Counter[str] = Counter()

    def run(self) -> int:
        """Writes what is missing; returns the number of batches of answers."""
        with sole_writer(self.path):
            self.prompt_file = self._begin()
            return self._write()

    def _begin(self) -> PromptFile:
        begun_with, path = self.begun_with, self.path
        check_begun_with(path, begun_with)
        prompt_path = path.with_name(path.name.removesuffix(".jsonl") + ".prompts.jsonl")
        check_begun_with(prompt_path, {name: begun_with[name] for name in begun_with if name not in _ONLY_FOR_ANSWERS})
        return PromptFile(
            prompt_path,
            self.writer,
            self.system_prompts,
            self.openings,
            list(self.tokenizer.all_special_tokens),
            self.settings.batch_size,
            self.settings.seed,
        )

    def _write(self) -> int:
        num_rows, num_batches = self.settings.num_prompts + len(self.questions), 0
        num_found, is_cut = len(whole_lines(self.path)), False
        with tqdm(desc="target writes", unit=" tokens", mininterval=5) as progress:
            for start, batch in self._batches(progress):
                stop, number = start + len(batch), num_batches
                num_batches += 1
                if stop <= num_found and (self.cache is None or self.cache.has(number)):
                    continue
                if start < num_found or not is_cut:
                    num_found, is_cut = cut_after(self.path, start), True
                texts = self.writer.answer(batch, self.settings.seed + start)
                if self.cache:
                    self.cache.write(number, [text.features for text in texts if text.features])
                append_rows(self.path, map(self._row, batch, texts))
                self.problems.update(text.problem for text in texts if text.problem)
                progress.set_postfix_str(f"{stop} of {num_rows} answers")
                progress.update(sum(text.num_tokens for text in texts))
        tqdm.write(
            f"{num_rows} prompts are answered. Dropped: of the prompts that the target wrote, "
            f"{_count(self.prompt_file.dropped)}; of the answers, {_count(self.problems)}."
        )
        return num_batches

    def _batches(self, progress: tqdm) -> Iterator[tuple[int, list[Request]]]:
        """Yields each batch with the row that it begins at; its prompts are written just before their round."""
        size, start = self.settings.batch_size, 0
        for prompts in self._rounds(progress):
            order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].text))
            for begin in range(0, len(order), size):
                rows = range(start, start + len(order[begin : begin + size]))
                chosen = [prompts[index] for index in order[begin : begin + size]]
                pairs = zip(chosen, rows, strict=True)
                yield start, [Request(prompt.messages, self._is_sampled(row)) for prompt, row in pairs]
                start += len(chosen)

    def _rounds(self, progress: tqdm) -> Iterator[list[Prompt]]:
        """Yields the prompts of each round: the target's own, and the same share of the questions."""
        own, asked = self.settings.num_prompts, self.questions
        num_rounds = max(-(-(own + len(asked)) // (_BATCHES_PER_ROUND * self.settings.batch_size)), 1)
        for index in range(num_rounds):
            first, last = own * index // num_rounds, own * (index + 1) // num_rounds
            self.prompt_file.grow(last, progress)
            mine = asked[len(asked) * index // num_rounds : len(asked) * (index + 1) // num_rounds]
            yield self.prompt_file.prompts[first:last] + mine

    def _is_sampled(self, row: int) -> bool:
        return random.Random(f"{self.settings.seed} {row}").random() < self.settings.sampled_share

    def _row(self, request: Request, text: Text) -> dict[str, Any]:
        if text.problem:
            return {"skipped": text.problem}
        messages = [*request.messages, {"role": "assistant", "content": text.text}]
        row = {"messages": messages, "sampled": request.sampled, "ended": text.ended}
        return row if text.turn is None else written_row(self.tokenizer, row, [text.turn])


def _digest(questions: Sequence[Prompt]) -> str:
    return hashlib.sha256(json.dumps([asdict(question) for question in questions]).encode()).hexdigest()


def _count(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} ({reason})" for reason, count in reasons.most_common()) or "none"
