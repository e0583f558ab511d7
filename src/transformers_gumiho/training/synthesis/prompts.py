"""The prompts that a target writes itself, without the useless ones and those that say the same again."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ...resumable_file import append_rows, cut_unfinished_batch, whole_lines
from .degenerate import why_degenerate
from .near_duplicates import NearDuplicates
from .writing import Start, Text, Writer


@dataclass(frozen=True)
class Prompt:
    """What a user says first, and what the system says before, if anything."""

    text: str
    system: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages that the target answers."""
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*system, {"role": "user", "content": self.text}]


class PromptFile:
    """
    The prompts in a file; it grows in batches, and each batch is the same whenever it is written.

    Args:
        path: The file: JSONL, also of the prompts that were dropped.
        writer: Who writes them.
        systems: System prompts, which take turns; without any, the template's own.
        openings: First words of users, which take turns after each system prompt; without any, the target's own.
        special_tokens: Texts that only templates write.
        batch_size: Prompts that are written at a time.
        seed: For sampling.
    """

    def __init__(
        self,
        path: Path,
        writer: Writer,
        systems: list[str],
        openings: list[str],
        special_tokens: list[str],
        batch_size: int,
        seed: int,
    ):
        self.path, self.writer, self.batch_size, self.seed = path, writer, batch_size, seed
        given: list[str | None] = [*systems]
        self.starts = [Start(system, words) for words in openings or [""] for system in given or [None]]
        self.special_tokens = special_tokens
        self.prompts: list[Prompt] = []
        self.dropped: Counter[str] = Counter()
        self._seen = NearDuplicates()
        self._num_written = cut_unfinished_batch(path, batch_size)
        for line in whole_lines(path):
            self._count(json.loads(line))

    def grow(self, num_prompts: int, progress: tqdm) -> None:
        """
        Writes until there are `num_prompts`.

        Raises:
            ValueError: Hardly any prompt that is written is of use.
        """
        while len(self.prompts) < num_prompts:
            before = self._num_written
            starts = [self.starts[index % len(self.starts)] for index in range(before, before + self.batch_size)]
            texts = self.writer.write_user_turns(starts, self.seed + before)
            rows = list(self._screen(texts, starts))
            append_rows(self.path, rows)
            self._num_written += len(rows)
            for row in rows:
                self._count(row)
            progress.set_postfix_str(f"{len(self.prompts)} prompts")
            progress.update(sum(text.num_tokens for text in texts))
            self._check_yield()

    def _screen(self, texts: list[Text], starts: list[Start]) -> Iterator[dict[str, str]]:
        for text, start in zip(texts, starts, strict=True):
            reason = text.problem or why_degenerate(text.text, text.ended, self.special_tokens)
            if start.opening and text.text == start.opening.strip():
                reason = "nothing after its opening"
            if reason is None and not self._seen.add(text.text):
                reason = "near-duplicate"
            row = {"prompt": text.text} | ({} if start.system is None else {"system": start.system})
            yield row | ({} if reason is None else {"dropped": reason})

    def _count(self, row: dict[str, str]) -> None:
        if reason := row.get("dropped"):
            self.dropped[reason] += 1
            return
        self._seen.add(row["prompt"])
        self.prompts.append(Prompt(row["prompt"], row.get("system")))

    def _check_yield(self) -> None:
        num_written = self._num_written
        if num_written >= 10 * self.batch_size and len(self.prompts) < num_written / 100:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
            raise ValueError(
                f"Of {num_written} prompts that the target wrote, {len(self.prompts)} are of use ({reasons}). It "
                f"seems not to know its own users: give prompts of your own (`--questions FILE --num_prompts 0`), or "
                f"system prompts (`--system_prompts FILE`) or first words (`--openings FILE`)."
            )
