"""One question answered twice at the same time: with the drafter and by plain decoding."""

import copy
import threading
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ...measuring.prompts import encode_turn
from ...model.modeling_gumiho import GumihoModel
from ...pairs import use_options
from ...user_errors import UserValueError
from ...verification.placement import input_device
from ..answering import Answer, stream_answer
from ..arguments import GenerateArguments
from .lock import ModelLock


logger = logging.get_logger(__name__)

# More than nearly any text has; to count the tokens of a longer one would take long already.
_CHARACTERS_PER_TOKEN = 16


@dataclass
class Host:
    """
    The models that answer all questions, whose settings stay as they are, and the limits of a question.

    Attributes:
        max_new_tokens: The most that a visitor may ask for.
        max_question_tokens: The most that a visitor may ask with.
        lock: The lock on the models.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: GumihoModel
    max_new_tokens: int
    max_question_tokens: int

    def __post_init__(self) -> None:
        self.lock = ModelLock(input_device(self.target))

    def encode(self, question: GenerateArguments) -> list[int]:
        """Returns the token ids of a question. Raises `ValueError` for an empty one, and for one that is too long."""
        text, most = question.prompt or "", self.max_question_tokens
        longest = _CHARACTERS_PER_TOKEN * most
        limit = f"the limit is {most} tokens and {longest} characters (`max_question_tokens`). Shorten it."
        if not text.strip():
            raise UserValueError("The question is empty. Write one first.")
        if len(text) > longest:
            raise UserValueError(f"The question has {len(text)} characters; {limit}")
        prompt = encode_turn(self.tokenizer, [text], [])
        if len(prompt) > most:
            raise UserValueError(f"The question has {len(prompt)} tokens; {limit}")
        positions = getattr(self.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if positions is not None and len(prompt) + question.max_new_tokens > positions:
            raise UserValueError(
                f"The question has {len(prompt)} tokens and the answer may have {question.max_new_tokens}, but the "
                f"target reads {positions} at most. Shorten the question, or ask for fewer new tokens."
            )
        return prompt


class Race:
    """
    The two answers to a question, generated at the same time. They share the models, and nothing else, with the
    answers to other questions.

    Args:
        host: The models.
        question: What is asked.

    Attributes:
        prompt: The question's token ids.
        wish_to_stop: Once it is set, both answers end at their next token or cycle.

    Raises:
        ValueError: The question is empty or too long, or a setting is out of range.
    """

    def __init__(self, host: Host, question: GenerateArguments):
        self.host, self.question = host, question
        self.plain, self.drafted = Answer(), Answer()
        self._drafter = with_options(host.drafter, question)
        self.prompt = host.encode(question)
        self.wish_to_stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(answer, drafter), daemon=True)
            for answer, drafter in ((self.drafted, self._drafter), (self.plain, None))
        ]

    def start(self) -> None:
        """Begins to write both answers, in threads of their own."""
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> bool:
        """Waits until both answers are over, for some `seconds`; returns whether they are."""
        for thread in self._threads:
            thread.join(seconds)
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return not {self.plain.progress, self.drafted.progress} & {"queued", "generating"}

    @property
    def is_unwanted(self) -> bool:
        """Whether the visitor has left or stopped it, or the page is closed."""
        return self.wish_to_stop.is_set() or self.host.lock.is_closed

    def _run(self, answer: Answer, drafter: GumihoModel | None) -> None:
        host, question = self.host, self.question

        def hand_over() -> None:
            hold.hand_over()
            if self.is_unwanted:
                raise KeyboardInterrupt

        try:
            with host.lock.hold(question.seed) as hold:
                if self.is_unwanted:
                    answer.progress = "stopped"
                    return
                stream_answer(
                    host.target, host.tokenizer, drafter, self.prompt, answer, on_step=hand_over,
                    max_new_tokens=question.max_new_tokens, temperature=question.temperature,
                    clock=lambda: hold.seconds,
                )  # fmt: skip
        except Exception as error:  # whatever it is, a visitor waits for the answer
            answer.problem = _explain(error)
            answer.progress = "failed"


def with_options(drafter: GumihoModel, question: GenerateArguments) -> GumihoModel:
    """Returns a drafter with the same weights and its own copy of the settings."""
    own = copy.copy(drafter)
    own.generation_config = copy.deepcopy(drafter.generation_config)
    use_options(own, question)
    return own


def _explain(error: Exception) -> str:
    """Returns what a visitor may read of an error; the log has all of it, which may be private."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
        return "Not enough memory for this answer. Choose fewer new tokens or a smaller tree, or try later."
    if isinstance(error, ValueError):
        return str(error)
    logger.error("An answer failed.", exc_info=error)
    return f"The answer failed ({type(error).__name__}). The server's log has the details."
