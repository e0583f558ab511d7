"""The prompts that a target writes itself, without the useless ones and those that say the same again."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...resumable_file import append_rows, complete_lines, cut_unfinished_batch
from ...user_errors import UserValueError
from .degenerate import why_degenerate
from .near_duplicates import NearDuplicates
from .writing import Text


@dataclass
class PromptFile:
    """
    The prompts in a file; it grows in batches, and each batch is the same whenever it is written.

    Attributes:
        path: The file: JSONL, also of the prompts that were dropped.
        write: Writes what users might say, for their first words and a seed.
        openings: First words, which take turns.
        special_tokens: Texts that only templates write.
        batch_size: Prompts that are written at a time.
        seed: For sampling.
        rows: `messages` of each useful prompt.
        dropped: Number of the others, by reason.
    """

    path: Path
    write: Callable[[Sequence[str], int], list[Text]]
    openings: Sequence[str]
    special_tokens: list[str]
    batch_size: int
    seed: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._seen = NearDuplicates()
        self._num_written = cut_unfinished_batch(self.path, self.batch_size)
        for line in complete_lines(self.path):
            self._count(json.loads(line))

    def grow(self, num_prompts: int) -> None:
        """Writes until there are `num_prompts`. Raises `ValueError` if hardly any prompt is useful."""
        done = min(len(self.rows), num_prompts)
        with tqdm(desc="target asks", total=num_prompts, initial=done, unit="prompt") as progress:
            while len(self.rows) < num_prompts:
                numbers = range(self._num_written, self._num_written + self.batch_size)
                openings = [self.openings[number % len(self.openings)] for number in numbers]
                texts = self.write(openings, self.seed + self._num_written)
                rows = [self._screen(text, opening) for text, opening in zip(texts, openings, strict=True)]
                append_rows(self.path, rows)
                self._num_written += len(rows)
                for row in rows:
                    self._count(row)
                progress.update(min(len(self.rows), num_prompts) - progress.n)
                if self._num_written >= 10 * self.batch_size and len(self.rows) < self._num_written / 100:
                    raise UserValueError(
                        f"Of {self._num_written} prompts that the target wrote, {len(self.rows)} are of use. Dropped: "
                        f"{count_in_words(self.dropped)}. Give questions (`--data FILE`) or first words "
                        f"(`--openings FILE`)."
                    )

    def _screen(self, text: Text, opening: str) -> dict[str, str]:
        """Returns the line of a prompt, with the reason where it is dropped."""
        reason = text.problem or why_degenerate(text.text, text.ended, self.special_tokens)
        if opening and text.text == opening.strip():
            reason = "nothing after its opening"
        if reason is None and not self._seen.add(text.text):
            reason = "near-duplicate"
        return {"prompt": text.text} | ({} if reason is None else {"dropped": reason})

    def _count(self, row: dict[str, str]) -> None:
        if reason := row.get("dropped"):
            self.dropped[reason] += 1
            return
        self._seen.add(row["prompt"])
        self.rows.append({"messages": [{"role": "user", "content": row["prompt"]}]})


def count_in_words(reasons: Counter[str]) -> str:
    """Returns how often each reason was counted."""
    return ", ".join(f"{count} ({reason})" for reason, count in reasons.most_common()) or "none"
