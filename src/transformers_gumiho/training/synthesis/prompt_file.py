"""The prompts that a target writes itself, without the useless ones and those that say the same again."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...resumable_file import append_rows, cut_unfinished_batch, whole_lines
from .degenerate import why_degenerate
from .near_duplicates import NearDuplicates
from .writing import Start, Text, Writer


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
        self.rows: list[dict[str, Any]] = []  # `messages` of each prompt of use
        self.dropped: Counter[str] = Counter()
        self._seen = NearDuplicates()
        self._num_written = cut_unfinished_batch(path, batch_size)
        for line in whole_lines(path):
            self._count(json.loads(line))

    def grow(self, num_prompts: int) -> None:
        """
        Writes until there are `num_prompts`.

        Raises:
            ValueError: Hardly any prompt that is written is of use.
        """
        begin, num_tokens = time.perf_counter(), 0
        progress = tqdm(desc="target asks", total=num_prompts, initial=min(len(self.rows), num_prompts), unit="prompt")
        while len(self.rows) < num_prompts:
            before = self._num_written
            starts = [self.starts[index % len(self.starts)] for index in range(before, before + self.batch_size)]
            texts = self.writer.write_user_turns(starts, self.seed + before)
            rows = list(self._screen(texts, starts))
            append_rows(self.path, rows)
            self._num_written += len(rows)
            for row in rows:
                self._count(row)
            num_tokens += sum(text.num_tokens for text in texts)
            progress.set_postfix_str(f"{num_tokens / (time.perf_counter() - begin):.0f} tokens/s")
            progress.update(min(len(self.rows), num_prompts) - progress.n)
            self._check_yield()
        progress.close()

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
        system = [{"role": "system", "content": row["system"]}] if "system" in row else []
        self.rows.append({"messages": [*system, {"role": "user", "content": row["prompt"]}]})

    def _check_yield(self) -> None:
        num_written = self._num_written
        if num_written >= 10 * self.batch_size and len(self.rows) < num_written / 100:
            raise ValueError(
                f"Of {num_written} prompts that the target wrote, {len(self.rows)} are of use. Dropped: "
                f"{count_in_words(self.dropped)}. Give questions (`--data FILE`), system prompts "
                f"(`--system_prompts FILE`) or first words (`--openings FILE`)."
            )


def count_in_words(reasons: Counter[str]) -> str:
    """Returns how often each reason was counted."""
    return ", ".join(f"{count} ({reason})" for reason, count in reasons.most_common()) or "none"
