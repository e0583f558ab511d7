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
        category: Category of the questions.
        questions: Names of the questions.
        turn: Index of the turn in the conversations, from 0.
        seconds: Time for decoding the batch, prompt included.
        num_tokens: New tokens of all prompts, without padding.
        equal: Whether every text is that of plain decoding.
        peak_bytes: Peak of the memory, beyond the memory in use before; `None` if the system does not report it.
        accepted_lengths: For each prompt, the number of tokens that each verification cycle committed, if there are
            cycles.
        stages: Seconds of each stage; see [`StageSeconds`]. On other devices than a CPU, these are from a separate
            run.
        num_compiled: Number of graphs that were compiled during the measurement.
        repeat_seconds: Time of a second run, for some samples of plain decoding.
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
