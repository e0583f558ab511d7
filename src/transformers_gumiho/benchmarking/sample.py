"""One measurement of a benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """
    One batch of prompts, decoded in one mode.

    Attributes:
        mode: The name of the mode.
        temperature: 0 is greedy.
        batch_size: Prompts decoded at once; the last batch of a category may have fewer.
        category: Of the questions.
        questions: Their names.
        turn: Which turn of theirs, from 0.
        seconds: For decoding the batch, prompt included.
        num_tokens: New tokens of all prompts, without padding.
        equal: Whether every text is that of plain decoding.
        peak_bytes: The most memory at one time, beyond what there was before; `None` if the system reports none.
        accepted_lengths: For each prompt, the tokens that each verification cycle committed, if there are cycles.
        stages: Seconds of each stage, on other devices than a CPU of a run of its own; see [`StageSeconds`].
        num_compiled: Graphs that were compiled while it was measured.
        repeat_seconds: For decoding the batch once more, of some samples of plain decoding.
    """

    mode: str
    temperature: float
    batch_size: int
    category: str
    questions: list[str]
    turn: int
    seconds: float
    num_tokens: int
    equal: bool
    peak_bytes: int | None
    accepted_lengths: list[list[int]] | None
    stages: dict[str, float] | None
    num_compiled: int = 0
    repeat_seconds: float | None = None
