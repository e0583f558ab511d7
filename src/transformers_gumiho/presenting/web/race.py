"""One question answered twice at the same time, with the drafter and by plain decoding, for several visitors."""

import copy
import threading
import time
from collections import deque
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


logger = logging.get_logger(__name__)

# More than nearly any text has; to count the tokens of a longer one would take long already.
_CHARACTERS_PER_TOKEN = 16


class ModelLock:
    """
    A first-in-first-out lock on the models, which its holders hand over after each token or cycle.

    Args:
        device: The target's device, whose random generator each holder has for itself.

    Attributes:
        is_closed: Whether the page is closed, so that all answers are to stop.
        queue: All who wait; the first one has the lock.
        changed: Is notified when the queue has another first one.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.is_closed = False
        self.changed = threading.Condition()
        self.queue: deque[Hold] = deque()


class Hold:
    """
    One answer's hold on the lock within a `with` block, and what it keeps between its turns: its clock and its random
    numbers, so that its seed gives the same text whatever others sample meanwhile.
    """

    def __init__(self, lock: ModelLock, seed: int):
        self._lock, self._seed = lock, seed
        self._seconds = 0.0
        self._begun: float | None = None  # its turn; none between two turns
        self._random_states: list[torch.Tensor] = []

    @property
    def seconds(self) -> float:
        """How long it has had the lock, the present turn included."""
        return self._seconds + (0.0 if self._begun is None else time.perf_counter() - self._begun)

    def hand_over(self) -> None:
        """Lets everybody else in the queue have one turn first."""
        self.__exit__()
        self.__enter__()

    def __enter__(self) -> "Hold":
        lock = self._lock
        with lock.changed:
            lock.queue.append(self)
            lock.changed.wait_for(lambda: lock.queue[0] is self)
        if not self._random_states:
            torch.manual_seed(self._seed)
        else:
            torch.set_rng_state(self._random_states[0])
            for state in self._random_states[1:]:
                torch.get_device_module(lock.device).set_rng_state(state, lock.device)
        self._begun = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        device = self._lock.device
        self._seconds, self._begun = self.seconds, None
        self._random_states = [torch.get_rng_state()]
        if device.type != "cpu":
            self._random_states.append(torch.get_device_module(device).get_rng_state(device))
        with self._lock.changed:
            self._lock.queue.remove(self)
            self._lock.changed.notify_all()


@dataclass
class Host:
    """
    The models that answer all questions, whose settings stay as they are, and the most that a visitor may ask for
    (`max_new_tokens`) and with (`max_question_tokens`).
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
    The two answers to a question. They share the models, and nothing else, with the answers to other questions.

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
        # The same weights, with settings of its own.
        drafter = copy.copy(host.drafter)
        drafter.generation_config = copy.deepcopy(host.drafter.generation_config)
        use_options(drafter, question)
        self.prompt = host.encode(question)
        self.wish_to_stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=pair, daemon=True)
            for pair in ((self.drafted, drafter), (self.plain, None))
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

    def _run(self, answer: Answer, drafter: GumihoModel | None) -> None:
        host, question = self.host, self.question

        def stop_if_unwanted() -> None:
            if self.wish_to_stop.is_set() or host.lock.is_closed:
                raise KeyboardInterrupt

        def hand_over() -> None:
            hold.hand_over()
            stop_if_unwanted()

        try:
            with Hold(host.lock, question.seed) as hold:
                stop_if_unwanted()
                stream_answer(
                    host.target, host.tokenizer, drafter, self.prompt, answer, on_step=hand_over,
                    max_new_tokens=question.max_new_tokens, temperature=question.temperature,
                    clock=lambda: hold.seconds,
                )  # fmt: skip
        except KeyboardInterrupt:
            answer.progress = "stopped"
        except Exception as error:  # whatever it is, a visitor waits for the answer
            answer.problem = _explain(error)
            answer.progress = "failed"


def _explain(error: Exception) -> str:
    """Returns what a visitor may read of an error; the log has all of it, which may be private."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
        return "Not enough memory for this answer. Choose fewer new tokens or a smaller tree, or try later."
    if isinstance(error, ValueError):
        return str(error)
    logger.error("An answer failed.", exc_info=error)
    return f"The answer failed ({type(error).__name__}). The server's log has the details."
